"""What auto comes to is written down where a linear is bound, with everybody who refused; emulation on a GPU is said aloud."""

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import loka
from loka.dispatch import recipe_named
from loka.kernels import registry
from loka.kernels.backend import YES, no
from loka.lowp import auto
from loka.lowp.auto import Pick, is_emulation, moved, settle, spell_refusals
from loka.lowp.binding import LinearBinding

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def bound_by(recipe: str, backend: str = "auto") -> LinearBinding:
    operands = recipe_named(recipe).operands
    return LinearBinding(*(o.on(backend) if (o := operands(g)) else None for g in ("fprop", "dgrad", "wgrad")))  # type: ignore[arg-type]


def weight_on(device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A weight of a machine that is not here: all that is asked of it."""
    return SimpleNamespace(device=device, dtype=dtype, shape=(32, 16))


def test_a_conversion_names_the_kernel_and_who_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    summary = loka.convert(model, recipe="rowwise")
    assert "fprop=e4m3:row@e4m3:row/auto (reference on cpu)" in summary.converted["0"]
    assert "wgrad=e4m3:row@e4m3:row/auto (reference on cpu)" in repr(model[1])
    (note,) = summary.notes
    assert note.startswith("auto is reference on cpu for 2 linears; refused: torch")
    assert "needs a CUDA GPU, not cpu" in note
    assert note in " ".join(str(summary).split())
    assert max(map(len, str(summary).splitlines())) <= 120
    assert "deepgemm: takes 1x128" in note


def test_named_backends_and_high_precision_stay_as_they_are() -> None:
    binding = bound_by("rowwise_with_gw_hp", "reference")
    assert settle(binding, nn.Linear(16, 32).weight) == (binding, [])
    settled, picks = settle(bound_by("rowwise_with_gw_hp"), nn.Linear(16, 32).weight)
    assert settled.wgrad is None or settled.wgrad.picked is not None
    assert settled.fprop is not None
    assert settled.fprop.backend == "auto"  # it stays auto: the linear may move
    assert settled == bound_by("rowwise_with_gw_hp")
    assert {str(pick) for pick in picks} == {"reference on cpu"}


def test_nothing_is_picked_without_a_device() -> None:
    model = nn.Linear(16, 16, device="meta")
    summary = loka.convert(model, recipe="rowwise")
    assert summary.notes == []
    assert "/auto," in summary.converted[""]


def test_a_kernel_that_depends_on_what_it_writes_is_named_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def supports(self, call: Any, device: torch.device) -> Any:
            return YES if call.out_dtype == torch.bfloat16 else no("writes bf16 only")

    monkeypatch.setitem(registry._LOADED, "scaled_mm.torch", Fake())
    registry._CACHE.clear()
    try:
        settled, picks = settle(bound_by("rowwise"), weight_on(CPU))
        assert settled.fprop is not None
        assert settled.wgrad is not None
        assert settled.fprop.picked == "reference or torch on cpu"  # float32, and bf16 under autocast
        assert settled.wgrad.picked == "reference on cpu"  # gradients of weights are written in the weight's type
        assert dict(picks[0].refusals)["torch"] == "writes bf16 only"
        half, _ = settle(bound_by("rowwise"), weight_on(CPU, torch.bfloat16))
        assert half.fprop is not None
        assert half.fprop.picked == "torch on cpu"
    finally:
        registry._CACHE.clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without a GPU says of one")
def test_emulation_on_a_gpu_is_said_aloud_when_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    _, picks = settle(bound_by("rowwise"), weight_on(CUDA))
    assert all(pick.emulated for pick in picks)
    elsewhere = Pick("reference", CUDA, (("torch", "too old"), ("triton", "too old"), ("fbgemm", "absent")))
    monkeypatch.setattr("loka.placing.conversion.settle", lambda binding, weight, rows: (binding, [elsewhere]))
    with pytest.warns(UserWarning, match=r"0, 1: emulated on cuda, no kernel can; refused: torch, triton: too old; fbgemm: absent") as seen:  # fmt: skip
        loka.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), recipe="rowwise")
    assert len(seen) == 1


def test_emulation_that_was_asked_for_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loka.convert(model, recipe="rowwise", backend="reference")  # on a CPU it is what there is
        loka.revert(model)
    monkeypatch.setattr(
        "loka.placing.conversion.is_emulation", lambda backend, _: backend == "reference"
    )  # as on a GPU
    with pytest.warns(UserWarning, match="0, 1: emulated on the GPU, as backend='reference' asks") as seen:
        loka.convert(model, recipe="rowwise", backend="reference")
    assert len(seen) == 1


def test_what_emulation_is() -> None:
    assert is_emulation("reference", CUDA)
    assert not is_emulation("reference", CPU)
    assert not is_emulation("torch", CUDA)
    assert not Pick("torch", CUDA, ()).emulated
    assert Pick("triton or reference", CUDA, ()).emulated


def test_a_move_is_written_down_and_emulation_that_begins_with_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Linear(16, 32).weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moved(bound_by("rowwise"), weight, torch.device("meta")).fprop.picked == "reference on cpu"  # type: ignore[union-attr]
        assert moved(bound_by("rowwise", "reference"), weight, CPU) == bound_by("rowwise", "reference")
    monkeypatch.setattr(auto, "is_emulation", lambda backend, _: backend == "reference")  # as on a GPU
    for binding in (bound_by("rowwise", "reference"), bound_by("rowwise")):
        with pytest.warns(UserWarning, match="converted on meta are emulated on cpu"):
            moved(binding, weight, torch.device("meta"))


def test_reasons_are_grouped() -> None:
    assert spell_refusals({"a": "no", "b": "never", "c": "no"}) == "a, c: no; b: never"


def test_a_settled_linear_trains_copies_and_compiles() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16))
    loka.convert(model, recipe="rowwise")
    x = torch.randn(4, 16)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    assert torch.equal(y, model(x))
    assert "reference on cpu" in repr(copy.deepcopy(model))
    assert pickle.loads(pickle.dumps(model[0].binding)).fprop.picked == "reference on cpu"


@pytest.mark.gpu
def test_on_a_gpu_auto_is_a_kernel() -> None:
    model = nn.Sequential(nn.Linear(256, 256)).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = loka.convert(model, recipe="rowwise")
    assert "reference" not in summary.converted["0"]
    assert "on cuda:0)" in summary.converted["0"]
    loka.revert(model)
    with pytest.warns(UserWarning, match="emulated on the GPU, as backend='reference' asks"):
        loka.convert(model, recipe="rowwise", backend="reference")


def test_measured_rows_decide_what_auto_runs_and_are_cited(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, name: str) -> None:
            self.name, self.ran = name, 0

        def supports(self, call: Any, device: torch.device) -> Any:
            return YES if call.m != 5 else no("five rows")

        def run(self, a: Any, b: Any, *, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
            self.ran += 1
            return (a.dequantize() @ b.dequantize().T).to(out_dtype)

    first, second = Fake("torch"), Fake("triton")
    monkeypatch.setitem(registry._LOADED, "scaled_mm.torch", first)
    monkeypatch.setitem(registry._LOADED, "scaled_mm.triton", second)
    seen: list[tuple[Any, ...]] = []

    def fastest(*call: Any) -> Any:
        seen.append(call)
        return SimpleNamespace(backend="triton", source="database row of today")

    monkeypatch.setattr(auto, "fastest_backend", fastest)
    registry._CACHE.clear()
    try:
        elsewhere, _ = settle(bound_by("rowwise"), weight_on(CUDA), rows=4096)
        assert elsewhere.fprop.picked == "triton on cuda, fastest by database row of today"  # type: ignore[union-attr]
        assert seen[0][0] == "fprop"
        assert seen[0][2:] == (4096, 16, 32)
        layer = nn.Linear(16, 32, bias=False)
        bound = settle(bound_by("rowwise"), layer.weight)[0]
        assert bound.fprop.picked == "torch on cpu"  # type: ignore[union-attr]  # no rows of a CPU: the registry's order
        model = loka.lowp.Linear.replacing(layer, elsewhere)
        model(torch.randn(4, 16))
        assert (first.ran, second.ran) == (0, 1)  # what is printed is what runs
        assert model(torch.randn(5, 16)).isfinite().all()  # a call that it cannot take goes to one that can
        assert (first.ran, second.ran) == (0, 1)
    finally:
        registry._CACHE.clear()
