"""The registry: every row has its file, nothing is substituted, everything that refuses is heard."""

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

import loka.kernels
from loka.formats import Spec
from loka.kernels import BACKENDS, UnsupportedError, Verdict, pick, registry, triton_device, verdicts
from loka.kernels.backend import YES, no, require_library
from loka.kernels.embedding_bag.call import BagCall
from loka.kernels.quantize import QuantizeCall, quantize
from loka.kernels.scaled_mm import MatmulCall, scaled_mm
from loka.kernels.topk.call import TopkCall

CPU = torch.device("cpu")
ROWS = [(op, name) for op, names in BACKENDS.items() for name in names]
every_row = pytest.mark.parametrize(("op", "name"), ROWS, ids=lambda part: part)


def a_call(op: str, spec: str = "e4m3:row") -> QuantizeCall | MatmulCall:
    if op == "quantize":
        return QuantizeCall(4, 32, Spec.parse(spec))
    return MatmulCall(4, 32, 8, Spec.parse(spec), Spec.parse(spec))


@every_row
def test_every_row_has_its_file(op: str, name: str) -> None:
    """Found without importing it: a library's backend is a file even where the library is not."""
    assert importlib.util.find_spec(f"loka.kernels.{op}.{name}") is not None


@every_row
def test_every_backend_meets_the_interface(op: str, name: str) -> None:
    module = registry.backend(op, name)
    assert callable(module.supports)
    assert callable(module.run)
    assert module.__doc__


def test_a_row_without_a_file_is_noticed(monkeypatch) -> None:
    monkeypatch.setitem(BACKENDS, "quantize", ("missing", *BACKENDS["quantize"]))
    assert importlib.util.find_spec("loka.kernels.quantize.missing") is None
    with pytest.raises(ModuleNotFoundError, match=r"loka\.kernels\.quantize\.missing"):
        registry.backend("quantize", "missing")


def test_every_op_folder_has_a_row_and_ends_with_the_law() -> None:
    folders = {path.parent.name for path in Path(loka.kernels.__file__).parent.glob("*/reference.py")}
    assert folders == set(BACKENDS), "an op without a row cannot be asked for"
    for names in BACKENDS.values():
        assert names[-1] == "reference"
        assert len(set(names)) == len(names)
        assert "auto" not in names


@pytest.mark.parametrize("op", ["quantize", "scaled_mm"])
def test_supports_never_raises_and_explains_every_no(op: str) -> None:
    specs = ["e4m3:row", "e5m2:tensor", "int4:3x5", "e2m1:1x16:e4m3", "e4m3:1x32:e8m0", "e5m2:*x7:static:stochastic"]
    for spec in specs:
        for kind in ("cpu", "cuda", "meta", "xpu"):
            for name, verdict in verdicts(op, a_call(op, spec), torch.device(kind)).items():
                assert isinstance(verdict, Verdict)
                assert verdict.ok or len(verdict.reason) > 10, name
    assert verdicts(op, a_call(op), CPU)["reference"].ok


def test_a_refusal_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="a refusal needs a reason"):
        Verdict(False)
    assert not no("because")
    assert YES


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"no op 'matmul'; ops are .*quantize.*scaled_mm"):
        registry.backend("matmul", "reference")
    with pytest.raises(ValueError, match=r"quantize has no backend 'cutlass'; backends are .*reference"):
        quantize(torch.ones(2, 4), Spec.parse("e4m3:row"), backend="cutlass")
    q = quantize(torch.ones(2, 4), Spec.parse("e4m3:row"), backend="reference")
    with pytest.raises(ValueError, match=r"scaled_mm has no backend 'cutlass'; backends are .*reference"):
        scaled_mm(q, q, out_dtype=torch.float32, backend="cutlass")


class Fake:
    """A backend of an op that does not exist elsewhere: says what it is told, remembers that it ran."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict, self.runs = verdict, 0

    def supports(self, call: object, device: torch.device) -> Verdict:
        return self.verdict

    def run(self, *operands: object, **options: object) -> str:
        self.runs += 1
        return "ran"


@pytest.fixture
def fakes(monkeypatch):
    """Registers fake backends in order of preference for an op `fake`."""

    def register(**verdicts: Verdict) -> dict[str, Fake]:
        made = {name: Fake(verdict) for name, verdict in verdicts.items()}
        monkeypatch.setitem(BACKENDS, "fake", tuple(made))
        for name, module in made.items():
            monkeypatch.setitem(registry._LOADED, f"fake.{name}", module)
        return made

    return register


def test_an_explicit_backend_that_cannot_run_raises_its_reason(fakes) -> None:
    made = fakes(fast=no("needs a GPU of next year"), slow=YES)
    with pytest.raises(UnsupportedError, match=r"fake backend 'fast' cannot run .* on cpu: needs a GPU of next year"):
        pick("fake", "fast", a_call("quantize"), CPU)
    assert made["slow"].runs == 0
    assert issubclass(UnsupportedError, ValueError)


def test_auto_takes_the_first_that_can_and_tells_who_refused(fakes) -> None:
    made = fakes(first=no("no first"), second=no("no second"), third=YES, fourth=YES)
    selection = pick("fake", "auto", a_call("quantize"), CPU)
    assert selection.name == "third"
    assert selection.backend is made["third"]
    assert selection.refusals == {"first": "no first", "second": "no second"}
    assert pick("fake", "fourth", a_call("quantize"), CPU).refusals == {}


def test_what_auto_prefers_counts_where_it_is_offered(fakes) -> None:
    """The performance database may name the fastest backend of a machine while only the law is offered."""
    fakes(first=YES, second=YES, reference=YES)
    call = a_call("quantize")
    assert pick("fake", "auto", call, CPU, prefer="second").name == "second"
    with registry.offering({"reference"}):
        assert pick("fake", "auto", call, CPU, prefer="second").name == "reference"
        with pytest.raises(ValueError, match="no backend 'second'"):
            pick("fake", "second", call, CPU)
    assert pick("fake", "auto", call, CPU, prefer="second").name == "second"


def test_auto_asks_once_per_call_and_device(fakes) -> None:
    made = fakes(first=no("no first"), second=YES)
    asked: list[object] = []
    for fake in made.values():
        fake.supports = lambda call, device, real=fake.supports: (asked.append(call), real(call, device))[1]
    one, other = a_call("quantize"), a_call("quantize", "e5m2:row")
    selections = [pick("fake", "auto", one, CPU) for _ in range(3)]
    assert asked == [one, one]  # both backends, in the first call only
    assert selections[0] is selections[2]
    assert selections[2].refusals == {"first": "no first"}
    pick("fake", "auto", other, CPU)
    pick("fake", "auto", one, torch.device("meta"))
    assert asked == [one, one, other, other, one, one]
    again = fakes(first=YES, second=YES)
    assert pick("fake", "auto", one, torch.device("xpu")).backend is again["first"]


def test_answers_of_ragged_batches_do_not_pile_up(fakes, monkeypatch) -> None:
    fakes(only=YES)
    monkeypatch.setattr(registry, "_CACHE_LIMIT", 8)
    for rows in range(50):
        pick("fake", "auto", QuantizeCall(rows, 32, Spec.parse("e4m3:row")), CPU)
        assert len(registry._CACHE) <= 8


def test_auto_without_any_raises_every_reason(fakes) -> None:
    fakes(first=no("no first"), second=no("no second"))
    with pytest.raises(
        UnsupportedError, match=r"no backend of fake can run .*:\n  first: no first\n  second: no second"
    ):
        pick("fake", "auto", a_call("quantize"), CPU)


def test_a_real_refusal_is_not_replaced_by_the_reference() -> None:
    x = torch.ones(2, 16)
    with pytest.raises(UnsupportedError, match=r"quantize backend 'triton' cannot run 2x16 float32 -> int8:row"):
        quantize(x, Spec.parse("int8:row"), backend="triton")
    q = quantize(x, Spec.parse("int8:row"), backend="reference")
    for name in BACKENDS["scaled_mm"]:
        if name != "reference":
            with pytest.raises(
                UnsupportedError, match=rf"scaled_mm backend '{name}' cannot run 2x16x2 int8:row @ int8:row"
            ):
                scaled_mm(q, q, out_dtype=torch.float32, backend=name)


def test_a_library_that_cannot_be_imported_is_a_verdict_with_the_install_line(monkeypatch) -> None:
    verdict = require_library("surely_not_installed_anywhere", "deepgemm")
    assert not verdict
    assert "surely_not_installed_anywhere cannot be imported (ModuleNotFoundError" in verdict.reason
    assert verdict.reason.endswith("install: pip install 'loka[deepgemm]'")

    def fail(name: str) -> None:
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(sys.modules["loka.kernels.backend"], "import_module", fail)
    assert "OSError: libcuda.so.1" in require_library("broken_install", "deepgemm").reason


def test_importing_the_registry_imports_no_backend_and_no_library() -> None:
    code = (
        "import sys, loka.kernels, loka.kernels.quantize, loka.kernels.scaled_mm, torch;"
        "found = {'triton', 'deep_gemm', 'fbgemm_gpu', 'torchao', 'transformer_engine'} & set(sys.modules);"
        "backends = [m for m in sys.modules if m.startswith('loka.kernels.') and m.endswith(('.reference', '.triton'))];"
        "print(sorted(found), backends, torch.cuda.is_initialized())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] [] False"


def test_calls_print_what_they_are() -> None:
    assert str(QuantizeCall(4, 32, Spec.parse("e4m3:row"), torch.float32)) == "4x32 float32 -> e4m3:row"
    alone = QuantizeCall(4, 32, None, torch.bfloat16, Spec.parse("e5m2:tensor"))
    assert str(alone) == "4x32 bfloat16 -> T e5m2:tensor"
    with pytest.raises(ValueError, match="asked for nothing"):
        QuantizeCall(4, 32, None)
    both = QuantizeCall(4, 32, Spec.parse("e4m3:row"), torch.bfloat16, Spec.parse("e5m2:tensor"))
    assert str(both) == "4x32 bfloat16 -> e4m3:row + T e5m2:tensor"
    call = MatmulCall(4, 32, 8, Spec.parse("e4m3:row"), Spec.parse("e4m3:tensor"), torch.float16, fast_accum=True)
    assert str(call) == "4x32x8 e4m3:row @ e4m3:tensor -> float16 fast"
    with pytest.raises(ValueError, match="negative GEMM shape 4 x -1 x 8"):
        MatmulCall(4, -1, 8, Spec.parse("e4m3:row"), Spec.parse("e4m3:row"))
    with pytest.raises(ValueError, match=r"scaled_mm writes .* got torch\.float64"):
        MatmulCall(4, 1, 8, Spec.parse("e4m3:row"), Spec.parse("e4m3:row"), torch.float64)


def test_emulation_on_a_gpu_is_said_aloud() -> None:
    """`auto` may end at the reference; on a GPU that is a surprise, and the reasons are given."""
    call = QuantizeCall(4, 16, Spec.parse("int8:row"))
    with pytest.warns(
        UserWarning, match=r"quantize 4x16 .* runs emulated on the GPU, no kernel can: triton: writes e4m3"
    ):
        assert registry.pick("quantize", "auto", call, torch.device("cuda")).name == "reference"


def test_no_op_has_an_argument_called_out() -> None:
    """torch's compiler takes a call with one for a mutation of everything, and merges nothing across it (`fused_linear` once had one: inputs that several chains read were quantised once for each)."""
    for op in ("fused_linear", "norm_quantize", "quantize", "scaled_mm"):
        importlib.import_module(f"loka.kernels.{op}.triton_ops")
    names = [name for name in dir(torch.ops.loka) if isinstance(getattr(torch.ops.loka, name), torch._ops.OpOverloadPacket)]  # fmt: skip
    assert {"fused_linear", "quantize"} <= set(names)
    for name in names:
        schema = getattr(torch.ops.loka, name).default._schema
        assert "out" not in {argument.name for argument in schema.arguments}, name


def test_listeners_of_several_threads_may_begin_and_end_in_any_order() -> None:
    """An engine judges its kernels while another one of the same process does."""
    call = QuantizeCall(4, 16, Spec.parse("e4m3:row"), torch.float32)
    heard: dict[str, int] = {"first": 0, "second": 0}

    def note(name: str) -> registry.Hear:
        return lambda op, chosen, call: heard.update({name: heard[name] + 1})

    first, second = registry.listening(note("first")), registry.listening(note("second"))
    first.__enter__()
    second.__enter__()
    registry.pick("quantize", "reference", call, torch.device("cpu"))
    first.__exit__(None, None, None)
    registry.pick("quantize", "reference", call, torch.device("cpu"))
    second.__exit__(None, None, None)
    registry.pick("quantize", "reference", call, torch.device("cpu"))
    assert heard == {"first": 1, "second": 2}


def test_references_stand_in_for_the_kernels_of_the_thread_that_wants_them_and_of_its_backward(monkeypatch) -> None:
    planted = ModuleType("planted")
    planted.supports = lambda call, device: YES
    monkeypatch.setitem(registry.BACKENDS, "quantize", ("planted", *registry.BACKENDS["quantize"]))
    monkeypatch.setitem(registry._LOADED, "quantize.planted", planted)
    call, ran = QuantizeCall(4, 64, Spec.parse("e4m3:row")), []

    def run(*given: object) -> None:
        ran.append(registry.pick("quantize", "auto", call, CPU).name)

    x = torch.ones(1, requires_grad=True)
    (other := x * 1).register_hook(run)
    with registry.listening(lambda *heard: None, references=("quantize",)):
        run()
        for work in (run, other.backward):  # the second as in the thread that runs the backward of a GPU
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    run()
    registry._CACHE.clear()
    assert ran == ["reference", "planted", "reference", "planted"]


def test_calls_that_differ_in_their_rows_are_of_one_kind() -> None:
    assert registry.kind_of(TopkCall(8, 100, 5)) == registry.kind_of(TopkCall(3, 100, 5))
    assert registry.kind_of(TopkCall(8, 100, 5)) != registry.kind_of(TopkCall(8, 99, 5))
    assert registry.kind_of(BagCall(500, 64, 8, 80)) == registry.kind_of(BagCall(500, 64, 3, 80))
    assert registry.kind_of(BagCall(500, 64, 8, 80)) != registry.kind_of(BagCall(400, 64, 8, 80))  # another table


def test_what_is_avoided_for_one_number_of_rows_is_avoided_for_all(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_AVOIDED", {})
    call = TopkCall(8, 100, 5)
    registry.avoid("topk", "reference", call, "wrong")
    assert registry.is_avoided("topk", "reference", TopkCall(3, 100, 5)) == "wrong"
    assert not registry.is_avoided("topk", "reference", TopkCall(3, 100, 6))
    registry._CACHE.clear()


def test_on_a_cpu_without_triton_the_reason_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installing Triton would not help there; whoever asks for its interpreter, or has a GPU, is told how to install it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    refusal = triton_device._find_triton_refusal.__wrapped__
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert refusal("cpu", -1).startswith("Triton needs a CUDA device; on the CPU only its interpreter runs")
    assert "install" in refusal("cuda", 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "install" in refusal("cpu", -1)
