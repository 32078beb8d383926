"""Watching one linear: what its three GEMMs are given on sampled steps.

A forward hook sees x and the output; a hook on the output tensor sees dy. Neither changes a value, and row sampling draws from a
generator of its own, so training is bit-identical with and without the probe.

Calls under no_grad (validation) are not recorded. A module called twice in a step contributes both calls; one never called says so.
"""

from typing import Any

import torch
from torch import Tensor, nn

from loka.probe.reservoir import Reservoir
from loka.probe.statistics import Statistics
from loka.records import GEMMS, Gemm, Role, TensorStats


class Watch:
    """Statistics and sampled rows of one nn.Linear."""

    def __init__(self, name: str, module: nn.Linear, rows: int, generator: torch.Generator) -> None:
        self.name, self.module = name, module
        self.k, self.n = module.in_features, module.out_features
        self.type = type(module).__name__
        device = module.weight.device
        self._rows, self._generator = rows, generator
        self.statistics: dict[Role, Statistics] = {
            "x": Statistics(self.k, device),
            "w": Statistics(self.k, device),
            "dy": Statistics(self.n, device),
        }
        self.reservoir = Reservoir(rows, (self.k, self.n), device, generator)
        self.calls = self.rows_seen = self.largest = 0
        self.needs_dgrad = False

    @property
    def gemms(self) -> list[Gemm]:
        """The GEMMs that happened."""
        absent = set() if self.reservoir.has_dy else {"dgrad", "wgrad"}
        if not self.needs_dgrad:
            absent.add("dgrad")
        if not self.module.weight.requires_grad:
            absent.add("wgrad")
        return [gemm for gemm in GEMMS if gemm not in absent] if self.calls else []

    @torch.no_grad()
    def see_forward(self, x: Tensor, output: Tensor, *, record_weight: bool) -> None:
        """One call: x [..., K] and its output, whose gradient will be seen in backward."""
        flat = x.detach().reshape(-1, self.k)
        self.calls += 1
        self.rows_seen += flat.shape[0]
        self.largest = max(self.largest, flat.shape[0])
        self.needs_dgrad |= x.requires_grad
        if record_weight:
            self.statistics["w"].update(self.module.weight)
        if flat.shape[0] == 0:
            return
        chosen = self._choose(flat.shape[0], flat.device)
        rows = flat if chosen is None else flat[chosen]
        rows = rows.clone()  # an in-place op after this module must not reach the sample
        self.statistics["x"].update(rows)
        if not output.requires_grad:
            self.reservoir.offer(rows, None)
            return
        output.register_hook(lambda dy: self._see_backward(rows, chosen, dy))  # type: ignore[no-untyped-call]

    def _see_backward(self, rows: Tensor, chosen: Tensor | None, dy: Tensor) -> None:
        flat = dy.detach().reshape(-1, self.n)
        picked = flat if chosen is None else flat[chosen]
        self.statistics["dy"].update(picked)
        self.reservoir.offer(rows, picked)

    def _choose(self, count: int, device: torch.device) -> Tensor | None:
        """Rows to look at: all of them, or `rows` at random without replacement."""
        if count <= self._rows:
            return None
        return torch.randperm(count, generator=self._generator)[: self._rows].to(device)

    def describe(self) -> list[TensorStats]:
        """The statistics that have seen anything."""
        finished = [self.statistics[role].finish(role) for role in self.statistics]
        return [stats for stats in finished if stats is not None]

    def _parts(self) -> dict[str, Any]:
        return {"reservoir": self.reservoir, **{str(role): part for role, part in self.statistics.items()}}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as flat named tensors."""
        counts = [self.calls, self.rows_seen, self.largest, int(self.needs_dgrad)]
        state = {
            f"{name}.{key}": value for name, part in self._parts().items() for key, value in part.state_dict().items()
        }
        return {**state, "counts": torch.tensor(counts)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
        self.calls, self.rows_seen, self.largest, dgrad = state["counts"].tolist()
        self.needs_dgrad = bool(dgrad)
        for name, part in self._parts().items():
            part.load_state_dict({k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")})
