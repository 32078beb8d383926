"""Mods in `loka train`: applied before training, or to a trained model, followed by a fine-tune to recover its quality.

    loka train --mods no_bias,block_norm,hard_swish                                     a new model
    loka train --from runs/a/checkpoints/step-00001000 --mods block_norm --steps 200    a trained one, fine-tuned

With `--from`, test metrics are measured three times: before the mods, right after them, and after the fine-tune. They
are written to mods.json together with the list of changes. If the keys of the checkpoint are not those of the original
model, it is taken for a checkpoint of the modified one: the mods are applied first, then it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.data import RankingData
    from loka.models import Ranker
    from loka.records import ModSummary, Recovery
    from loka.training import TrainConfig

METRICS = {"log_loss": True, "ne": True, "auc": False}  # name: whether lower is better


@dataclass(frozen=True)
class Rewrite:
    """The mods applied before training, and the test metrics before and after them; None for an untrained model."""

    summary: ModSummary
    before: dict[str, float] | None = None
    after: dict[str, float] | None = None

    def finish(self, metrics: dict[str, float], steps: int, out: Path | None, *, resumed: bool) -> ModSummary:
        """Add the metrics after training to the summary, write it to mods.json, and return it."""
        import msgspec

        from loka import records

        known = self._measured(steps)
        file = None if out is None else out / "mods.json"
        if resumed and file is not None and file.exists():
            known = records.load(file, records.ModSummary).recovery
        ended = [msgspec.structs.replace(r, after_training=metrics.get(r.metric), steps=steps) for r in known]
        summary = msgspec.structs.replace(self.summary, recovery=ended)
        if file is not None:
            records.save(summary, file)
        return summary

    def _measured(self, steps: int) -> list[Recovery]:
        from loka.records import Recovery

        if self.before is None or self.after is None:
            return []
        return [
            Recovery(
                metric=name,
                before=self.before[name],
                after_mods=self.after[name],
                after_training=None,
                steps=steps,
                lower_is_better=lower,
            )
            for name, lower in METRICS.items()
            if name in self.before and name in self.after
        ]


def rewrite(network: Ranker, names: str, dataset: RankingData, weights: Path | None, settings: TrainConfig) -> Rewrite:
    """Load the weights, if any, and apply the mods; test before and after if the weights are of the original model."""
    from loka import mods
    from loka.training import read_checkpoint

    batch = next(iter(dataset.train.batches(8, shuffle=False, seed=0)))
    if weights is None:
        return Rewrite(mods.apply(network, names, example=batch).summary)
    state = read_checkpoint(weights, groups=("model",)).tensors["model"]
    if set(state) != set(network.state_dict()):
        applied = mods.apply(network, names, example=batch)
        mods.load_state_dict(network, state)
        return Rewrite(applied.summary)
    mods.load_state_dict(network, state)
    before = _measure(network, dataset, settings)
    network.to("cpu")
    applied = mods.apply(network, names, example=batch)
    return Rewrite(applied.summary, before, _measure(network, dataset, settings))


def _measure(network: Any, dataset: RankingData, settings: TrainConfig) -> dict[str, float]:
    from loka.training import Trainer

    quiet = replace(settings, checkpoint_every=0)
    return Trainer(network, dataset, quiet).evaluate(dataset.test)


def describe(recovery: Recovery) -> str:
    """Format the three values and the recovered share as one line."""
    ended = (
        "not trained"
        if recovery.after_training is None
        else f"{recovery.after_training:.5f} after {recovery.steps} steps"
    )
    share = "" if recovery.recovered is None else f" ({recovery.recovered:.0%} of the loss recovered)"
    return f"{recovery.metric} {recovery.before:.5f} -> {recovery.after_mods:.5f} with mods -> {ended}{share}"
