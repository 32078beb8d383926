"""The engine on this library's Triton kernels: here in Triton's interpreter, in a child process, because the switch is read at import."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.interpreter import run_interpreted
from loka.inference import Engine, EngineConfig
from loka.inference import engine as engine_file
from loka.models.onerec import Experts
from loka.ptq import quantize

from .small import make_index, make_model, make_requests, search_plainly

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Copies(TorchDispatchMode):
    """Counts what moves bytes and computes nothing, outside our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function) in ("aten.copy_.default", "aten.clone.default")
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(not INTERPRETED, reason="runs in the child of the test below")
@pytest.mark.parametrize("recipe", ["none", "onerec", "onerec_rows", "onerec_mixed"])
def test_every_kernel_in_one_search(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block copies nothing: two slices of the context and the first token are all a generation copies, however deep the model is."""
    monkeypatch.setattr(engine_file, "JUDGED", ())  # the interpreter's FP8 loses a NaN
    experts = Experts(routed=4, top=2, hidden=128, dense_blocks=1)
    model = make_model("tiny-moe", d=128, heads=4, layers=2, d_ff=128, experts=experts)
    quantize(model, recipe)
    index = make_index(model)
    engine = Engine(model, EngineConfig(beams=6, requests=(2,), dtype="fp32"), valid=index.trie)
    assert engine.tuning.tuned(12).blocks[1].ffn.fused == (recipe != "onerec_rows")  # a tile has no whole row to scale
    requests = make_requests(model, (0, 20))
    expected = search_plainly(model, requests, 6, index.trie)
    for row, found in enumerate(engine.generate(requests)):
        assert torch.equal(found.items, expected.items[row])
        torch.testing.assert_close(found.scores, expected.scores[row], rtol=1e-4, atol=1e-4)
    if recipe in ("none", "onerec"):
        with Copies() as seen:
            engine.run(engine.buckets[0])
        assert seen.count <= 3


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the child")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__, "every_kernel")
