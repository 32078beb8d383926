"""All data of one site: statistics, learned distributions and kept rows of x, dy and W; saved, merged and sampled.

Operands for an evaluation are drawn from one of four sources:

    rows        kept rows of x and dy, of the same examples; the actual W          the control
    gaussian    mu + L z;  M + L_U Z L_V^T                                         what the published method uses
    copula      the same dependence with the empirical marginals                   keeps tails, zeros, outlier channels
    normal      N(0, 1)                                                            what kernel benchmarks usually use

Only real rows keep x and dy of the same example together. The other sources draw them independently, so their weight
gradient dy^T x is noise around the product of the means, as the weight gradient of a trained model nearly is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loka.probe.gaussian import Gaussian, draw_normal
from loka.probe.ledger import Share
from loka.probe.marginals import Marginals, match_ranks
from loka.probe.matrix_normal import MatrixNormal
from loka.probe.reservoir import Reservoir
from loka.probe.saving import select_prefix
from loka.probe.statistics import Statistics
from loka.probe.window import Windows
from loka.records import SOURCES, Role, Source, TensorStats

MAX_EXAMPLES = 8  # second operands kept if they are activations; experts added per snapshot


class Learned:
    """Data of a site whose x has `widths[0]` channels and whose dy has `widths[1]`."""

    def __init__(
        self,
        name: str,
        widths: tuple[int, int],
        device: torch.device,
        seed: int,
        share: Share,
        *,
        weight: bool,
        window: int,
    ) -> None:
        self.name, self.widths = name, widths
        x, dy = widths
        self.statistics: dict[Role, Statistics] = {
            "x": Statistics(x, device),
            "w": Statistics(x, device),
            "dy": Statistics(dy, device),
        }
        self._generator = torch.Generator()
        self.reservoir = Reservoir(share.rows, widths, device, self._generator)
        self.windows = Windows(share.rows, widths, device, window)
        self.gaussians: dict[Role, Gaussian] = {}
        self.matrix_normal: MatrixNormal | None = None
        if share.cap:
            self.gaussians = {
                "x": Gaussian(x, device, cap=share.cap, seed=seed),
                "dy": Gaussian(dy, device, cap=share.cap, seed=seed + 1),
            }
            if weight:
                self.matrix_normal = MatrixNormal(dy, x, device, cap=share.side_cap, whole_mean=share.whole_mean)
        self._examples: list[Tensor] = []
        self._examples_seen = 0
        self.bytes = share.bytes

    @property
    def device(self) -> torch.device:
        """The device that holds the data."""
        return self.reservoir.x.device

    @property
    def kind(self) -> str:
        """How the distributions are stored, in words."""
        if not self.gaussians:
            return "real rows only: the rest did not fit into memory_budget"
        kinds = {str(role): part.kind for role, part in self.gaussians.items()}
        if self.matrix_normal is not None:
            kinds["w"] = self.matrix_normal.kind
        full = set(kinds.values()) == {"full"}
        return "full" if full else "; ".join(f"{role}: {kind}" for role, kind in kinds.items())

    def see(self, x: Tensor, dy: Tensor | None, right: Tensor | None, step: int, generator: torch.Generator) -> None:
        """Learn from the rows of one look, and from the second operand of one example if that is an activation."""
        self._generator.set_state(generator.get_state())
        self.windows.advance(step, self.statistics)
        self._see_rows("x", x, step)
        if dy is not None:
            self._see_rows("dy", dy, step)
        self.reservoir.offer(x, dy)
        self.windows.see(x, dy, generator)
        if right is not None:
            self.see_weight(right, step)
            self._keep_example(right)

    def recall(self, rows: Reservoir, other: "Learned", generator: torch.Generator) -> None:
        """Learn only from these rows, and share the weights of `other`."""
        self.see(rows.x, rows.dy, None, 0, generator)
        self.statistics["w"] = other.statistics["w"]
        self.matrix_normal, self._examples = other.matrix_normal, other._examples

    def _see_rows(self, role: Role, rows: Tensor, step: int) -> None:
        clean, usable = self.statistics[role].update(rows, step)
        if role in self.gaussians:
            self.gaussians[role].update(clean, usable)

    def _keep_example(self, right: Tensor) -> None:
        self._examples_seen += 1
        if len(self._examples) < MAX_EXAMPLES:
            self._examples.append(right.float())
            return
        slot = int(torch.randint(self._examples_seen, (), generator=self._generator))
        if slot < MAX_EXAMPLES:
            self._examples[slot] = right.float()

    def see_weight(self, weight: Tensor, step: int) -> None:
        """Update the statistics with a weight [rows, K]."""
        self.statistics["w"].update(weight, step)

    def snapshot(self, weight: Tensor | None) -> None:
        """Add the weight, some of its experts, or the kept second operands to the matrix normal."""
        if self.matrix_normal is None:
            return
        for matrix in self._matrices(weight)[:MAX_EXAMPLES]:
            self.matrix_normal.update(matrix)

    def _matrices(self, weight: Tensor | None) -> list[Tensor]:
        if weight is None:
            return self._examples
        return [weight] if weight.dim() == 2 else list(weight.unbind())

    def release(self) -> None:
        """Free cached factors. They are recomputed on demand."""
        for gaussian in self.gaussians.values():
            gaussian.release()
        if self.matrix_normal is not None:
            self.matrix_normal.release()

    def describe(self) -> list[TensorStats]:
        """Return the statistics of all operands that were observed."""
        found = [self.statistics[role].finish(role) for role in self.statistics]
        return [stats for stats in found if stats is not None]

    @torch.no_grad()
    def draw(self, role: Role, source: Source, count: int, generator: torch.Generator, weight: Tensor | None) -> Tensor:
        """Draw rows of x or dy, or one weight. See `Watch.draw`."""
        _check_source(source)
        if role == "w":
            return self._draw_weight(source, generator, weight)
        kept = self._kept_rows(role)
        if source == "rows":
            return kept[self._pick_rows(count, generator)].float()
        if source == "normal":
            return draw_normal((count, kept.shape[1]), generator, kept.device)
        self._require_distribution(source)
        gaussian = self.gaussians[role]
        if source == "gaussian":
            return gaussian.sample(count, generator)
        normals, deviation = gaussian.normals(count, generator), gaussian.deviation()
        return Marginals(kept).apply(normals / torch.where(deviation > 0, deviation, 1.0))

    @torch.no_grad()
    def draw_pair(self, source: Source, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw x and dy; with source "rows" they belong to the same examples."""
        _check_source(source)
        x, dy = self._kept_rows("x"), self._kept_rows("dy")
        if source != "rows":
            return self.draw("x", source, count, generator, None), self.draw("dy", source, count, generator, None)
        chosen = self._pick_rows(count, generator)
        return x[chosen].float(), dy[chosen].float()

    def _kept_rows(self, role: Role) -> Tensor:
        rows = self.reservoir.x if role == "x" else self.reservoir.dy
        if rows is None:
            raise ValueError(f"{self.name}: no gradient was seen, so there is no dy to draw")
        return rows

    def _pick_rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw indices of `count` kept rows, without replacement if there are enough."""
        kept = self.reservoir.kept
        if kept == 0:
            raise ValueError(f"{self.name}: no row was kept, so there is none to draw")
        many = count > kept
        draw = torch.randint(kept, (count,), generator=generator) if many else torch.randperm(kept, generator=generator)
        return draw[:count].to(self.device)

    def _draw_weight(self, source: Source, generator: torch.Generator, weight: Tensor | None) -> Tensor:
        """Return the actual matrix (of a random expert or example), or draw one like it."""
        matrices = self._matrices(weight)
        if not matrices:
            raise ValueError(f"{self.name}: no second operand was seen, so there is none to draw")
        number = int(torch.randint(len(matrices), (), generator=generator)) if len(matrices) > 1 else 0
        actual = matrices[number].detach().float()
        if source == "rows":
            return actual
        if source == "normal":
            return draw_normal(tuple(actual.shape), generator, actual.device)
        self._require_distribution(source)
        if self.matrix_normal is None:
            raise ValueError(f"{self.name}: a table of embeddings has no matrix normal")
        if self.matrix_normal.snapshots == 0:
            self.snapshot(weight)
        sample = self.matrix_normal.sample(generator)
        return sample if source == "gaussian" else match_ranks(sample, actual)

    def _require_distribution(self, source: Source) -> None:
        if source in ("gaussian", "copula") and not self.gaussians:
            raise ValueError(
                f"{self.name}: its distribution did not fit into memory_budget, so source={source!r} is not available; "
                "hint: raise memory_budget, or probe fewer sites"
            )

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"reservoir": self.reservoir, "windows": self.windows}
        parts |= {str(role): part for role, part in self.statistics.items()}
        parts |= {f"gaussian_{role}": part for role, part in self.gaussians.items()}
        return parts if self.matrix_normal is None else {**parts, "matrix_normal": self.matrix_normal}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as flat named tensors."""
        state = {f"{name}.{key}": v for name, part in self._parts().items() for key, v in part.state_dict().items()}
        examples = {f"example.{i}": example.cpu().clone() for i, example in enumerate(self._examples)}
        return {**state, **examples, "examples_seen": torch.tensor(self._examples_seen)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        for name, part in self._parts().items():
            mine = select_prefix(state, f"{name}.")
            if not mine:
                raise ValueError(f"{self.name}: the state has no {name}; was it saved under another memory_budget?")
            part.load_state_dict(mine)
        self._examples_seen = int(state["examples_seen"])
        self._examples = [
            state[f"example.{i}"].to(self.device, copy=True) for i in range(MAX_EXAMPLES) if f"example.{i}" in state
        ]

    def merge(self, other: "Learned", generator: torch.Generator) -> None:
        """Add the data of another rank. The matrix normal is not merged, because all ranks have the same weights."""
        self._generator.set_state(generator.get_state())
        roles: tuple[Role, ...] = ("x", "w", "dy") if self._examples or other._examples else ("x", "dy")
        for role in roles:
            self.statistics[role].merge(other.statistics[role])
        for role, learned in self.gaussians.items():
            learned.merge(other.gaussians[role])
        self.reservoir.merge(other.reservoir)
        self.windows.merge(other.windows, roles, generator)
        for example in other._examples:
            self._keep_example(example.to(self.device))


def _check_source(source: str) -> None:
    if source not in SOURCES:
        raise ValueError(f"source={source!r}: expected one of {', '.join(SOURCES)}")
