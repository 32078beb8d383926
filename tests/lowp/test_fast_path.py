"""A converted linear inside torch's transformer modules is called in eval mode as in training; reverted, torch's fused kernel is back."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loka import mods
from loka.lowp.linear import linears_of
from loka.placing import convert, revert


def layer(**options: object) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0, **options)  # type: ignore[arg-type]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_runs_converted_in_eval_mode(norm_first: bool) -> None:
    model = layer(norm_first=norm_first)
    plain = copy.deepcopy(model)
    summary = convert(model, recipe="tensorwise")
    assert set(summary.converted) == {"linear1", "linear2"}
    with torch.no_grad():
        training = model(X)
        model.eval(), plain.eval()
        assert 1e-4 < relative(model(X), plain(X)) < 0.1
        assert torch.allclose(model(X), training, atol=1e-6)
        with torch.inference_mode():
            assert torch.equal(model(X), copy.deepcopy(model)(X))  # copies too
        revert(model)
        assert torch.equal(model(X), plain(X))
    assert not model._forward_pre_hooks


def test_an_encoder_with_padding_runs_converted() -> None:
    """Its nested tensors are for the fused kernel alone."""
    model = nn.TransformerEncoder(layer(), 2)
    plain = copy.deepcopy(model)
    calls: list[str] = []
    convert(model, recipe="rowwise")
    model.eval(), plain.eval()
    with torch.no_grad():
        y, expected = model(X, src_key_padding_mask=PADDING), plain(X, src_key_padding_mask=PADDING)
        kept = ~PADDING
        assert 1e-4 < relative(y[kept], expected[kept]) < 0.1
        for name, linear in linears_of(model):
            linear.register_forward_hook(lambda *_, name=name: calls.append(name))
        model(X, src_key_padding_mask=PADDING)
        assert calls == ["layers.0.linear1", "layers.0.linear2", "layers.1.linear1", "layers.1.linear2"]
        revert(model)
        assert model.use_nested_tensor == plain.use_nested_tensor
        assert set(vars(model)) == set(vars(plain))


@pytest.mark.parametrize("way", ["converted", "modified"])
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(32)], ids=["no last norm", "last norm"])
@pytest.mark.parametrize("alike", [True, False], ids=["left aligned", "anywhere"])
def test_padding_comes_out_as_torch_leaves_it(way: str, norm: nn.Module | None, alike: bool) -> None:
    """A model that averages over all positions would have another result in eval mode."""
    model = nn.TransformerEncoder(layer(), 2, norm=copy.deepcopy(norm)).eval()
    if norm is not None:
        nn.init.normal_(model.norm.bias)  # zeros before it are no zeros behind it
    plain, padding = copy.deepcopy(model), PADDING if alike else PADDING.flip(1)
    if way == "converted":
        convert(model, recipe="rowwise")
    else:
        assert mods.apply(model, "attention_layout", example={"src": X, "src_key_padding_mask": padding}).summary.changed  # fmt: skip
    with torch.no_grad():
        expected = plain(X, src_key_padding_mask=padding)
        for twin in (model, copy.deepcopy(model)):
            y = twin(X, src_key_padding_mask=padding)
            assert relative(y.mean(1), expected.mean(1)) < 0.1
            assert relative(y, expected) < 0.1
        revert(model) if way == "converted" else mods.revert(model)
        assert torch.equal(model(X, src_key_padding_mask=PADDING), plain(X, src_key_padding_mask=PADDING))
    assert not any(m._forward_hooks or m._forward_hooks_with_kwargs for m in model.modules())


def test_a_layer_that_is_kept_keeps_its_fast_path() -> None:
    model = nn.Sequential(layer(), nn.Linear(32, 32))
    convert(model, recipe="rowwise", module_filter_fn=lambda _, name: name == "1")
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True, dropout=0.0), lambda m: m(X, X)),
        (lambda: nn.Transformer(32, 4, 1, 1, 64, batch_first=True, dropout=0.0), lambda m: m(X, X)),
        (lambda: nn.AdaptiveLogSoftmaxWithLoss(32, 20, [8, 12]), lambda m: m.log_prob(X[0])),
    ],
    ids=["decoder layer", "transformer", "adaptive softmax"],
)
def test_torch_s_other_modules_call_every_converted_linear(
    make: Callable[[], nn.Module], run: Callable[[nn.Module], Tensor]
) -> None:
    torch.manual_seed(0)
    model = make()
    convert(model, recipe="rowwise")
    model.eval()
    called: set[str] = set()
    names = {name for name, _ in linears_of(model)}
    for name, linear in linears_of(model):
        real = linear.forward
        linear.__dict__["forward"] = lambda x, name=name, real=real: (called.add(name), real(x))[
            1
        ]  # no hook: hooks close fast paths
    with torch.no_grad():
        run(model)
    assert called == names
    assert names


def test_compiled_too() -> None:
    torch._dynamo.reset()
    model = layer()
    convert(model, recipe="rowwise", backend="reference")
    model.eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(X), model(X), atol=1e-6)


def test_a_layer_that_was_converted_alone_refuses_the_packed_batches_of_its_encoder() -> None:
    encoder = nn.TransformerEncoder(layer(), 2).eval()
    convert(encoder.layers[0], recipe="rowwise", backend="reference")
    with torch.no_grad(), pytest.raises(ValueError, match="convert the encoder or the whole model"):
        encoder(X, src_key_padding_mask=PADDING)


class _Looping(nn.TransformerEncoder):
    def forward(self, src: Tensor, src_key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        for inner in self.layers:
            src = inner(src, src_key_padding_mask=src_key_padding_mask)
        return src


class _Inheriting(nn.TransformerEncoder):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.TransformerEncoder, _Looping, _Inheriting])
@pytest.mark.parametrize("around", ["nothing", "no fast path", "a function mode"])
def test_padding_is_zeroed_where_torch_would_have_packed_and_nowhere_else(kind: type, around: str) -> None:
    """Encoders that never pack: layers that somebody loops over, torch's fused path switched off, a default device."""
    model = kind(layer(), 2).eval()
    plain = copy.deepcopy(model)
    convert(model, recipe="rowwise")
    model = copy.deepcopy(model)
    torch.backends.mha.set_fastpath_enabled(around != "no fast path")
    try:
        with torch.no_grad(), torch.device("cpu") if around == "a function mode" else contextlib.nullcontext():
            assert relative(model(X, src_key_padding_mask=PADDING), plain(X, src_key_padding_mask=PADDING)) < 0.1
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
