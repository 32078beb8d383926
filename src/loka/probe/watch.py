"""Watching one linear: what its three GEMMs are given on sampled steps.

A forward hook sees x and the output; a hook on the output tensor sees dy. Neither changes a value, and row sampling draws from a
generator of its own, so training is bit-identical with and without the probe.

Calls under no_grad (validation) are not recorded. A module called twice in a step contributes both calls; one never called says so.
"""

from typing import Any

import torch
from torch import Tensor, nn

from loka.probe.gaussian import Gaussian
from loka.probe.marginals import match_ranks
from loka.probe.matrix_normal import MatrixNormal
from loka.probe.reservoir import Reservoir
from loka.probe.source import Source, check_source, draw_modelled, pick_rows, rows_of
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
        self.gaussians: dict[Role, Gaussian] = {"x": Gaussian(self.k, device), "dy": Gaussian(self.n, device)}
        self.matrix_normal = MatrixNormal(self.n, self.k, device)
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
        self.gaussians["x"].update(rows)
        if not output.requires_grad:
            self.reservoir.offer(rows, None)
            return
        output.register_hook(lambda dy: self._see_backward(rows, chosen, dy))  # type: ignore[no-untyped-call]

    def _see_backward(self, rows: Tensor, chosen: Tensor | None, dy: Tensor) -> None:
        flat = dy.detach().reshape(-1, self.n)
        picked = flat if chosen is None else flat[chosen]
        self.statistics["dy"].update(picked)
        self.gaussians["dy"].update(picked)
        self.reservoir.offer(rows, picked)

    def _choose(self, count: int, device: torch.device) -> Tensor | None:
        """Rows to look at: all of them, or `rows` at random without replacement."""
        if count <= self._rows:
            return None
        return torch.randperm(count, generator=self._generator)[: self._rows].to(device)

    @property
    def covariance_kind(self) -> str:
        """How the covariances of x and dy and the matrix normal of W are kept, for the report."""
        kinds = {"x": self.gaussians["x"].kind, "dy": self.gaussians["dy"].kind, "w": self.matrix_normal.kind}
        return (
            "full" if set(kinds.values()) == {"full"} else "; ".join(f"{role}: {kind}" for role, kind in kinds.items())
        )

    @torch.no_grad()
    def draw(self, role: Role, source: Source, count: int, generator: torch.Generator) -> Tensor:
        """float32: `count` rows of x [count, K] or dy [count, N], or one weight [N, K]. See `loka.probe.source`."""
        check_source(source)
        if role == "w":
            return self._draw_weight(source, generator)
        kept = rows_of(self.reservoir, role, self.name)
        if source == "rows":
            return kept[pick_rows(self.reservoir, count, generator, self.name)].float()
        width = self.k if role == "x" else self.n
        return draw_modelled(source, self.gaussians[role], kept, width, count, generator)

    @torch.no_grad()
    def draw_pair(self, source: Source, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """x and dy; of real rows, x and dy of the same examples."""
        check_source(source)
        if source != "rows":
            return self.draw("x", source, count, generator), self.draw("dy", source, count, generator)
        x, dy = rows_of(self.reservoir, "x", self.name), rows_of(self.reservoir, "dy", self.name)
        chosen = pick_rows(self.reservoir, count, generator, self.name)
        return x[chosen].float(), dy[chosen].float()

    def _draw_weight(self, source: Source, generator: torch.Generator) -> Tensor:
        weight = self.module.weight.detach().float()
        if source == "rows":
            return weight
        if source == "normal":
            return torch.randn(weight.shape, generator=generator, device=generator.device).to(weight.device)
        if self.matrix_normal.snapshots == 0:
            self.matrix_normal.update(weight)
        sample = self.matrix_normal.sample(generator)
        return sample if source == "gaussian" else match_ranks(sample, weight)

    def describe(self) -> list[TensorStats]:
        """The statistics that have seen anything."""
        finished = [self.statistics[role].finish(role) for role in self.statistics]
        return [stats for stats in finished if stats is not None]

    def _parts(self) -> dict[str, Any]:
        return {
            "reservoir": self.reservoir,
            "matrix_normal": self.matrix_normal,
            **{str(role): part for role, part in self.statistics.items()},
            **{f"gaussian_{role}": part for role, part in self.gaussians.items()},
        }

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
