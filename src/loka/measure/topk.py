"""Benchmark adapter of topk: the k best of each row of scores (shape rows x scores x k). Baseline: torch.topk.

A variant is the dtype of the scores, e.g. `float32`. Options: `beams=B` (B beams with that many codes each, fused with
log-softmax), `masked` (with beams: most codes forbidden), `unsorted`.

Values and indices must equal the reference, including the order of ties. For the baseline only the values are checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.topk import reference
from loka.kernels.topk.call import BeamTopkCall, TopkCall
from loka.measure import inputs
from loka.measure.conformance import Conformance, show_first
from loka.measure.fused import judge_twice
from loka.measure.inputs import Shape
from loka.measure.op import DTYPES, Op
from loka.measure.timing import Thunk

ALLOWED_SHARE = 0.02  # share of codes that the mask allows


@dataclass(frozen=True)
class BeamScores:
    """Operands of the fused form. Only the check passes `lse`, so that all backends compare equal scores."""

    logits: Tensor
    scores: Tensor
    mask: Tensor | None
    lse: Tensor


class Topk(Op[TopkCall | BeamTopkCall]):
    """Selection from rows of scores, or from beams x codes."""

    op = "topk"
    VARIANTS = ("float32", "bfloat16", "float32|beams=4", "bfloat16|beams=4|masked")

    def parse(self, shape: Shape, variant: str) -> TopkCall | BeamTopkCall:
        """See `Op.parse`: rows, scores per row, k and a dtype."""
        kind, *options = variant.split("|")
        beams = [int(o.removeprefix("beams=")) for o in options if o.startswith("beams=")]
        unknown = [o for o in options if o not in ("masked", "unsorted") and not o.startswith("beams=")]
        if kind not in DTYPES or unknown or ("masked" in options and not beams):
            raise ValueError(
                f"variant {variant!r} is not DTYPE[|unsorted] or DTYPE|beams=B[|masked]; e.g. {self.VARIANTS[3]}"
            )
        rows, n, k = shape
        dtype = DTYPES[kind]
        if not beams:
            return TopkCall(rows, n, k, dtype, "unsorted" not in options)
        return BeamTopkCall(rows, beams[0], n, k, dtype, "masked" in options)

    def spell(self, call: TopkCall | BeamTopkCall) -> str:
        """See `Op.spell`."""
        options = [str(call.dtype).removeprefix("torch.")]
        if isinstance(call, BeamTopkCall):
            options += [f"beams={call.beams}", *(["masked"] if call.masked else [])]
        elif not call.sorted:
            options.append("unsorted")
        return "|".join(options)

    def decode(self, fields: dict[str, Any]) -> TopkCall | BeamTopkCall:
        """See `Op.decode`."""
        width = fields["codes"] if "codes" in fields else fields["n"]
        return self.parse((fields["rows"], width, fields["k"]), fields["variant"])

    def shape(self, call: TopkCall | BeamTopkCall) -> dict[str, int]:
        """Return rows, scores per row (or beams and codes) and k."""
        if isinstance(call, BeamTopkCall):
            return {"rows": call.requests, "beams": call.beams, "codes": call.codes, "k": call.k}
        return {"rows": call.rows, "n": call.n, "k": call.k}

    def operands(
        self, call: TopkCall | BeamTopkCall, *, seed: int, distribution: str, device: torch.device
    ) -> Tensor | BeamScores:
        """Draw scores from the distribution."""
        if isinstance(call, TopkCall):
            return inputs.draw(call.rows, call.n, distribution=distribution, seed=seed, device=device, dtype=call.dtype)
        rows = call.requests * call.beams
        logits = inputs.draw(
            rows, call.codes, distribution=distribution, seed=3 * seed, device=device, dtype=call.dtype
        )
        logits = logits.view(call.requests, call.beams, call.codes)
        scores = -inputs.draw(call.requests, call.beams, seed=3 * seed + 1, device=device).abs()
        mask = None
        if call.masked:
            generator = torch.Generator(device=device).manual_seed(3 * seed + 2)
            mask = torch.rand(logits.shape, generator=generator, device=device) < ALLOWED_SHARE
        return BeamScores(logits, scores, mask, logits.float().logsumexp(-1))

    def thunk(self, backend: Any, call: TopkCall | BeamTopkCall, operands: Tensor | BeamScores) -> Thunk:
        """See `Op.thunk`."""
        if isinstance(call, TopkCall):
            return lambda: backend.run(operands, call.k, sorted=call.sorted)
        assert isinstance(operands, BeamScores)
        o = operands
        return lambda: backend.beams(o.logits, o.scores, call.k, mask=o.mask)

    def check(self, backend: Any, call: TopkCall | BeamTopkCall, operands: Tensor | BeamScores) -> Conformance:
        """Check for equality, plain and poisoned; the fused form also with its own log-sum-exp, up to rounding."""
        if isinstance(operands, Tensor):
            assert isinstance(call, TopkCall)
            law: tuple[Tensor, ...] = reference.run(operands, call.k, sorted=call.sorted)
            return judge_twice(self.thunk(backend, call, operands), lambda result: _equal(result, law))
        o = operands
        law = reference.beams(o.logits, o.scores, call.k, mask=o.mask, lse=o.lse)
        given = judge_twice(
            lambda: backend.beams(o.logits, o.scores, call.k, mask=o.mask, lse=o.lse),
            lambda result: _equal(result, law),
        )
        return given and judge_twice(
            self.thunk(backend, call, operands), lambda result: _judge_beams(result, o, law[0])
        )

    def baseline(self, call: TopkCall | BeamTopkCall, operands: Tensor | BeamScores) -> Thunk:
        """Return torch.topk; for beams after log_softmax, sum and mask in plain torch."""
        if isinstance(operands, Tensor):
            ordered = not isinstance(call, TopkCall) or call.sorted
            return lambda: operands.topk(call.k, dim=1, sorted=ordered)
        o = operands

        def search() -> tuple[Tensor, Tensor, Tensor]:
            total = o.scores[..., None] + o.logits.float().log_softmax(-1)
            if o.mask is not None:
                total = total.masked_fill(~o.mask, float("-inf"))
            values, best = total.flatten(1).topk(call.k, dim=1)
            return values, best // o.logits.shape[2], best % o.logits.shape[2]

        return search

    def check_baseline(self, call: TopkCall | BeamTopkCall, operands: Tensor | BeamScores) -> Conformance:
        """Check that the values match the reference."""
        values = self.baseline(call, operands)()[0]
        if isinstance(operands, Tensor):
            law = reference.run(operands, call.k)[0]
            return _near(values.float().sort(dim=1, descending=True).values, law.float())
        o = operands
        return _near(values, reference.beams(o.logits, o.scores, call.k, mask=o.mask, lse=o.lse)[0])

    def bytes_moved(self, call: TopkCall | BeamTopkCall) -> int:
        """Count every score once, and the mask."""
        if isinstance(call, BeamTopkCall):
            return call.requests * call.beams * call.codes * (call.dtype.itemsize + call.masked)
        return call.rows * call.n * call.dtype.itemsize


def _equal(found: Sequence[Tensor], law: Sequence[Tensor]) -> Conformance:
    for name, ours, theirs in zip(("values", "first index", "second index"), found, law, strict=False):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            seen = f"{tuple(ours.shape)} {ours.dtype}, expected {tuple(theirs.shape)} {theirs.dtype}"
            return Conformance.failed(f"{name}: {seen}")
        wrong = ~((ours == theirs) | ((ours != ours) & (theirs != theirs)))
        if wrong.any():
            return Conformance.failed(f"{name}: {int(wrong.sum())} differ, {show_first(wrong, ours, theirs)}")
    return Conformance(True, 0.0, 0.0)


def _judge_beams(found: Sequence[Tensor], o: BeamScores, law: Tensor) -> Conformance:
    """Compare the values of a search that computes its own log-sum-exp, and those at the places that it returns."""
    values, parents, codes = found
    near = _near(values, law)
    if not near:
        return near
    width = o.logits.shape[2]
    at = parents * width + codes
    if not bool(((codes >= 0) & (codes < width) & (at >= 0) & (at < o.logits[0].numel())).all()):
        return Conformance.failed("a beam or a code does not exist")
    total = o.scores[..., None] + (o.logits.float() - o.lse[..., None])
    there = total if o.mask is None else total.masked_fill(~o.mask, float("-inf"))
    alive = values > float("-inf")
    ordered = torch.where(alive, at, -1 - torch.arange(at.shape[1], device=at.device)).sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return Conformance.failed("a code of a beam is chosen twice")
    return _near(torch.where(alive, there.flatten(1).gather(1, at), values), values)


def _near(values: Tensor, law: Tensor) -> Conformance:
    """Compare sorted values, up to the rounding of a logarithm."""
    absent = law == float("-inf")
    if not torch.equal(values == float("-inf"), absent):
        return Conformance.failed("other slots are empty than in the reference", 1e-4)
    gap = torch.where(absent | law.isnan(), 0.0, (values - law).abs())
    error = float((gap / (1 + law.abs().nan_to_num(0.0, 0.0, 0.0))).max()) if gap.numel() else 0.0
    return Conformance.within(error, 1e-4, f"values are off by {error:.2g}")
