"""stored_sums: compiled inference writes the sum in front of a norm to memory; the values are the same, and nothing else changes."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import loka


class Blocks(nn.Module):
    """A residual stream, pre-norm."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(24) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return self.head(x)


class Joined(nn.Module):
    """A norm behind a concatenation, and one behind a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(24, 8), nn.Linear(24, 16)
        self.norm, self.other = nn.LayerNorm(24), nn.LayerNorm(24)
        self.middle, self.head = nn.Linear(24, 24), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.cat([self.left(x), self.right(x)], -1))
        return self.head(self.other(self.middle(x)))


class RMSNorm(nn.Module):
    """A user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, RMSNorm])
def test_norms_behind_sums_are_found_whatever_their_class(norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Blocks(norm)
    applied = loka.mods.apply(model, "stored_sums", example=torch.randn(4, 24))
    assert applied.sites["stored_sums"] == ["norms.1", "norms.2"]
    assert applied.effect == "exact"


class PostNorm(nn.Module):
    """Only the norm reads the sum, but for the second, which joins two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(24), nn.LayerNorm(24)
        self.linear, self.left, self.right = nn.Linear(24, 24), nn.Linear(24, 8), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.linear(x))
        return self.second(torch.cat([self.left(x), self.right(x)], -1) + x)


def test_a_sum_that_only_a_norm_reads_is_not_stored() -> None:
    applied = loka.mods.apply(PostNorm(), "stored_sums", example=torch.randn(4, 24))
    assert applied.sites["stored_sums"] == ["second"]


def test_norms_behind_linears_are_left_to_chains() -> None:
    model = Joined()
    applied = loka.mods.apply(model, "stored_sums", example=torch.randn(4, 24))
    assert applied.sites["stored_sums"] == ["norm"]


def test_the_compiler_stores_each_sum_once() -> None:
    """Three branches and the head read the stream: with the mod no kernel adds up more than one branch."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(64, 24)
    changed = copy.deepcopy(model)
    loka.mods.apply(changed, "stored_sums", example=x)
    expected = model(x).detach()

    def most_loads(compiled: nn.Module) -> int:
        """The largest number of buffers that one kernel reads."""
        torch._dynamo.reset()
        with torch.no_grad():
            out, codes = run_and_get_code(torch.compile(compiled, fullgraph=True), x)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        kernels = [found for code in codes for found in re.findall(r"void\s+kernel\((.*?)\)", code, re.DOTALL)]
        assert kernels
        return max(len(re.findall(r"in_ptr|in_out_ptr", arguments)) for arguments in kernels)

    assert most_loads(changed) < most_loads(model)


@pytest.mark.parametrize("rows", [(5,), (2, 3), ()])
def test_compiled_results_and_training_do_not_change(rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Blocks()
    changed = copy.deepcopy(model)
    loka.mods.apply(changed, "stored_sums", example=torch.randn(4, 24))
    x = torch.randn(*rows, 24)
    torch._dynamo.reset()
    compiled = torch.compile(changed)
    assert torch.equal(changed(x), model(x))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    compiled(x).sum().backward()
    model(x).sum().backward()
    for p, q in zip(model.parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4)


def test_a_transposed_stream_is_read_as_it_lies() -> None:
    torch.manual_seed(0)
    model = Blocks()
    changed = copy.deepcopy(model)
    loka.mods.apply(changed, "stored_sums", example=torch.randn(4, 24))
    x = torch.randn(24, 7).T
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(changed)(x), model(x), rtol=1e-5, atol=1e-5)


def test_it_is_undone_and_copied() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(6, 24)
    changed = copy.deepcopy(model)
    loka.mods.apply(changed, "stored_sums", example=x)
    assert torch.equal(copy.deepcopy(changed)(x), model(x))
    loka.mods.revert(changed)
    assert not any(m._forward_pre_hooks for m in changed.modules())
    assert torch.equal(changed(x), model(x))


class Sliced(Blocks):
    """A longer batch than the example's is read from its fourth row on: a contiguous view with an offset."""

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x[3:] if x.shape[0] > 8 else x)).sum(0)
        return self.head(x)


def test_a_view_with_an_offset_is_read_from_there() -> None:
    torch.manual_seed(0)
    model = Sliced()
    changed = copy.deepcopy(model)
    assert loka.mods.apply(changed, "stored_sums", example=torch.randn(4, 24)).sites["stored_sums"]
    torch._dynamo.reset()
    compiled = torch.compile(changed, fullgraph=True)
    for x in (torch.randn(6, 24), torch.randn(12, 24), torch.randn(20, 24)[5:]):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
