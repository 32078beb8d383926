import pytest
import torch
from torch import Tensor, nn

from loka import mods

from .zoo import build_family, subject


class Deep(nn.Module):
    """Many small contributions to a large stream: what bf16 loses."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Small() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(16), nn.Linear(16, 16, bias=False)
        nn.init.uniform_(self.linear.weight, 0.0, 0.002)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def test_the_stream_keeps_what_bf16_would_lose():
    torch.manual_seed(0)
    model, x = Deep(), 1 + torch.rand(8, 16)
    exact = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(x.bfloat16()).float()
        applied = mods.apply(model, "protect_residual", example=x)
        kept = model(x.bfloat16()).float()
    assert len(applied.summary.changed) == 24
    assert (plain - exact).abs().mean() > 4 * (kept - exact).abs().mean()


@pytest.mark.parametrize("family", ["dcn", "dhen", "wukong", "hstu", "interformer", "onerec"])
def test_every_residual_model_runs_with_a_wide_stream_and_16_bit_branches(family):
    model, inputs = build_family(family, **({"bias": True} if family != "onerec" else {}))
    model.float()
    inputs = tuple(t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs)
    applied = mods.apply(model, "protect_residual", example=inputs)
    assert applied.summary.changed
    site = model.get_submodule(applied.summary.changed[0].site)
    seen = {}
    site.register_forward_hook(lambda m, args, out: seen.update(out=out[0] if isinstance(out, tuple) else out))
    linear = next(m for m in site.modules() if isinstance(m, nn.Linear))
    linear.register_forward_hook(lambda m, args, out: seen.update(branch=out))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(*inputs)
    assert seen["out"].dtype == torch.float32
    assert seen["branch"].dtype == torch.bfloat16


def test_16_bit_models_are_refused():
    model, _ = subject("residual")
    applied = mods.apply(model.bfloat16(), "protect_residual")
    assert not applied.summary.changed
    assert "keep them in float32 and use autocast" in applied.summary.left[0].why


def test_a_traced_forward_still_compiles():
    model, x = Deep(2), torch.randn(4, 16)
    mods.apply(model, "protect_residual", example=x)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
