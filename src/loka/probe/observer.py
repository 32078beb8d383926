"""Observer: the collecting half of a Probe. It finds sites, attaches hooks, schedules looks, saves and merges state.

Each site is observed on one step in `every`. Sites are split into `stagger` groups of about equal cost, so that no
single step pays for all of them: with every=100 and stagger=4, a quarter of the sites is observed on each of the steps
0, 25, 50 and 75. On all other steps a hook costs one `if`.

Under torch.compile there are two graphs, one for sampled steps and one for the others (`loka.probe.seeing`). Creating a
Probe resets torch.compile, because existing graphs do not include its hooks.

Every `snapshot_every` steps the weights are added to their matrix normals, one site per step, and the state is saved to
`save_to`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka.dispatch import recipe_named
from loka.nn.wrapping import is_scripted, named_sites, unwrap
from loka.probe import chain_tap
from loka.probe.adapter import KINDS, Adapter, Kind, find_adapter
from loka.probe.chain_tap import ChainTap, follows_head
from loka.probe.chains import ExampleKeeper
from loka.probe.hook import Switch, make_hook
from loka.probe.ledger import DEFAULT_BUDGET, Ledger
from loka.probe.loss import LossWatch, make_output_hook
from loka.probe.saving import Saver, read_state
from loka.probe.score import SCORED
from loka.probe.seeing import make_hooks_count
from loka.probe.unseen import find_unseen, inside_attention, make_counting_hook
from loka.probe.watch import LossOf, Watch
from loka.probe.weights import shape_of_weight

ModuleFilter = Callable[[nn.Module, str], bool]
MAX_STAGGER = 4
MAX_NOTES = 20
SLOT_STEPS = 25  # minimum steps between the turns of two groups, unless `stagger` is given


class Observer:
    """Observes the sites of a model while it trains. See `Probe` for the arguments."""

    def __init__(
        self,
        model: nn.Module,
        module_filter_fn: ModuleFilter | None = None,
        *,
        every: int = 100,
        rows: int = 1024,
        seed: int = 0,
        kinds: Sequence[Kind] = ("linear",),
        stagger: int | None = None,
        memory_budget: int = DEFAULT_BUDGET,
        snapshot_every: int = 10_000,
        window: int | None = None,
        recipes: Sequence[str] = (),
        save_to: str | Path | None = None,
    ) -> None:
        if every < 1 or rows < 2 or snapshot_every < 1:
            raise ValueError(
                f"every={every}, rows={rows}, snapshot_every={snapshot_every}: expected at least 1, 2 and 1"
            )
        if window is not None and window < every:
            raise ValueError(f"window={window}: expected at least every={every} steps, so that a window holds a look")
        if stagger is not None and not 1 <= stagger <= every:
            raise ValueError(f"stagger={stagger}: expected between 1 and every={every} groups of sites")
        self.model, self.every, self.rows = unwrap(model), every, rows
        self.snapshot_every, self.save_to = snapshot_every, save_to
        self.steps = self.sampled_steps = 0
        self.recipes = tuple(recipe_named(name).name for name in recipes)
        self._seed, self._saver = seed, Saver()
        self._window = 10 * every if window is None else window
        self.ledger = Ledger(memory_budget, rows)
        self._watches = self._find_sites(module_filter_fn, kinds)
        self._slots = assign_slots(
            list(self._watches.values()), stagger or min(MAX_STAGGER, max(1, every // SLOT_STEPS))
        )
        self._switch = Switch()
        self._device = next((watch.device for watch in self._watches.values()), torch.device("cpu"))
        self._loss = LossWatch(self._device)
        self.notes: list[str] = []  # errors that belong to no single site, without duplicates
        make_hooks_count()
        # Prepended, because FSDP2's own forward hook frees the unsharded weight.
        self._handles: list[RemovableHandle] = [
            watch.module.register_forward_hook(
                make_hook(self._switch, watch, self._loss), with_kwargs=True, prepend=True
            )
            for watch in self._watches.values()
        ]
        self._handles += [
            unseen.module.register_forward_hook(make_counting_hook(self._switch, unseen), with_kwargs=True)
            for unseen in self._unseen
            if not is_scripted(unseen.module)
        ]
        by_module = {id(watch.module): watch for watch in self._watches.values()}
        linears = {id(module): module for module in self.model.modules() if isinstance(module, nn.Linear)}
        self._taps = [
            ChainTap(self._switch, linear, by_module, self._loss, rows=rows, seed=seed + 7919 * number)
            for number, linear in enumerate(linears.values())
        ]
        for tap in self._taps:
            chain_tap.attach(tap)
        self._example = ExampleKeeper(self._switch)
        self._handles.append(model.register_forward_pre_hook(self._example.make_hook(), with_kwargs=True))
        output = make_output_hook(self._switch, self._loss)
        self._handles.append(self.model.register_forward_hook(output, with_kwargs=True))
        self._schedule()

    def _find_sites(self, keep: ModuleFilter | None, kinds: Sequence[Kind]) -> dict[str, Watch]:
        unknown = set(kinds) - set(KINDS)
        if unknown:
            raise ValueError(f"kinds={sorted(unknown)}: expected some of {', '.join(KINDS)}")
        found: list[tuple[str, nn.Module, Adapter]] = []
        uncalled = inside_attention(self.model)
        outside: set[int] = set()
        seen: set[int] = set()
        for name, module in named_sites(self.model):
            adapter = find_adapter(module)
            if adapter is None or id(module) in seen or id(module) in uncalled:
                continue
            if adapter.kind not in kinds or (keep is not None and not keep(module, name)):
                outside.add(id(module))
                continue
            seen.add(id(module))
            found.append((name, module, adapter))
        if not found:
            raise ValueError(
                f"nothing to probe: the model has no site of the kinds {', '.join(kinds)} that module_filter_fn accepts"
            )
        self._unseen = find_unseen(self.model, {*seen, *uncalled}, outside)
        self.ledger.prepare([shape for _, module, adapter in found if (shape := shape_of(module, adapter)) is not None])
        return {
            name: Watch(
                name,
                module,
                adapter,
                rows=self.rows,
                seed=self._seed + 7919 * number,
                ledger=self.ledger,
                window=self._window,
                recipes=dict.fromkeys((*SCORED, *self.recipes)),
            )
            for number, (name, module, adapter) in enumerate(found)
        }

    @property
    def sampling(self) -> bool:
        """Whether the current step is sampled."""
        return self._switch.on

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the observed modules."""
        return tuple(self._watches)

    def watch(self, site: str) -> Watch:
        """Return the `Watch` of one site, by name."""
        if site not in self._watches:
            raise ValueError(f"no site {site!r}; sites are {', '.join(self._watches)}")
        return self._watches[site]

    def _schedule(self) -> None:
        """Enable the sites that are due on the coming step."""
        for number, slot in enumerate(self._slots):
            due = bool(self._handles) and self.steps % self.every == number * self.every // len(self._slots)
            for watch in slot:
                watch.on = due
        by_module = {id(watch.module): watch for watch in self._watches.values()}
        for watch in self._watches.values():  # all links of a chain are observed on the same step
            head = by_module.get(id(follows_head(watch.module)))
            watch.on = watch.on if head is None else head.on
        self._switch.on = any(watch.on for watch in self._watches.values())

    def step(self, loss: Tensor | float | None = None) -> None:
        """Mark the end of a training step. Never raises; errors are recorded in `notes` and in the report.

        Args:
            loss: the loss that was differentiated. Needed only if it is not a cross-entropy of the model's output
                (`loka.probe.loss`).

        Example:
            >>> loss.backward(); optimizer.step(); probe.step()
        """
        try:
            self.absorb(loss)
            self.steps += 1
            self._take_snapshots()
        except Exception as error:
            self._note(f"step {self.steps}: {type(error).__name__}: {error}")
        self._schedule()

    def _take_snapshots(self) -> None:
        if self.steps < self.snapshot_every or not self._handles:
            return
        for number, watch in enumerate(self._watches.values()):
            if self.steps % self.snapshot_every == number % self.snapshot_every:
                watch.snapshot()
        if self.save_to is not None and self.steps % self.snapshot_every == 0:
            self.save(self.save_to)

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def absorb(self, loss: Tensor | float | None = None) -> None:
        """Process the looks collected so far in the current step."""
        if not self._switch.on:
            return
        with torch.autocast(self._device.type, enabled=False):
            loss_of = self._settle_loss(loss)
            for tap in self._taps:
                tap.finish()
            shown = [watch.absorb(self.steps, loss_of) for watch in self._watches.values()]
        self.sampled_steps += any(shown)
        self._find_ungraded()

    def _find_ungraded(self) -> None:
        """Tell the hooks whether calls without gradients count: only until some step has gradients."""
        self._switch.ungraded = all(watch.forward_only or not watch.calls for watch in self._watches.values())

    def _settle_loss(self, loss: Tensor | float | None) -> LossOf | None:
        try:
            if self._loss.off is not None:
                self._note(self._loss.off)
            return self._loss.settle(loss)
        except Exception as error:
            self._note(f"the loss could not be recognized: {type(error).__name__}: {error}")
            return None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable observation inside this context."""
        before, self._switch.on = self._switch.on, False
        try:
            yield
        finally:
            self._switch.on = before

    def detach(self) -> None:
        """Remove every hook. The collected data is kept."""
        self.absorb()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for tap in self._taps:
            chain_tap.detach(tap)
        self._schedule()

    # Saving, restoring, and merging across ranks

    def state_dict(self) -> dict[str, Tensor]:
        """Return the collected data as flat named tensors, suitable for safetensors."""
        self.absorb()
        state = {f"{name}:{key}": value for name, w in self._watches.items() for key, value in w.state_dict().items()}
        return {**state, "counts": torch.tensor([self.steps, self.sampled_steps, *self._extra_counts()])}

    def _extra_counts(self) -> list[int]:
        return []

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state. Raises ValueError if it belongs to a different set of sites."""
        parts = self._split(state)
        self.steps, self.sampled_steps = state["counts"].tolist()[:2]
        for name, watch in self._watches.items():
            watch.load_state_dict(parts[name])
        self._find_ungraded()
        self._schedule()

    def _split(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        parts: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            if key != "counts":
                name, _, rest = key.rpartition(":")
                parts.setdefault(name, {})[rest] = value
        if parts.keys() != self._watches.keys():
            there, here = parts.keys() - self._watches.keys(), self._watches.keys() - parts.keys()
            raise ValueError(
                f"the state holds other sites: only there {sorted(there)[:5]}, only here {sorted(here)[:5]}"
            )
        return parts

    def save(self, path: str | Path, *, wait: bool = False) -> None:
        """Write the state as safetensors, in the background unless `wait` is True."""
        self._saver.save(self.state_dict(), path)
        if wait:
            self._saver.wait()

    def wait(self) -> None:
        """Wait for a background save to finish; raises ValueError if it failed."""
        self._saver.wait()

    def load(self, path: str | Path) -> None:
        """Restore the state from a file."""
        self._saver.wait()
        self.load_state_dict(read_state(path))

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add the `state_dict` of another rank's probe of the same model."""
        self.absorb()
        for name, part in self._split(state).items():
            self._watches[name].merge(part)
        self.sampled_steps = max(self.sampled_steps, int(state["counts"][1]))
        self._find_ungraded()

    def gather(self, *, dst: int = 0, group: Any = None) -> None:
        """Merge the data of all ranks into rank `dst`. A collective call; other ranks keep their own data unchanged."""
        here, state = dist.get_rank() == dst, self.state_dict()
        states: list[Any] | None = [None] * dist.get_world_size(group) if here else None
        dist.gather_object(state, states, dst=dst, group=group)
        for rank, other in enumerate(states or []):  # in the order of the group, whose ranks may not be the global ones
            if rank != dist.get_rank(group):
                self.merge(other)


def shape_of(module: nn.Module, adapter: Adapter) -> tuple[int, int, bool] | None:
    """Return (width of x, width of dy, has a matrix normal), or None if unknown before the first call."""
    shape = shape_of_weight(module, adapter.weight)
    if shape is None:
        return None
    width = shape[-1]
    return (width, width, False) if adapter.kind == "lookup" else (width, shape[-2], True)


def assign_slots(watches: Sequence[Watch], count: int) -> list[list[Watch]]:
    """Split sites into groups of about equal cost, greedily: the most expensive first, each into the cheapest group."""
    slots: list[list[Watch]] = [[] for _ in range(min(count, len(watches)))]
    costs = [0.0] * len(slots)
    for watch in sorted(watches, key=lambda w: -(w.k**2 + w.n**2)):
        lightest = costs.index(min(costs))
        slots[lightest].append(watch)
        costs[lightest] += watch.k**2 + watch.n**2 + 1
    return slots
