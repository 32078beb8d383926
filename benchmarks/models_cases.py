"""What benchmarks/models.py measures: Wukong the obvious way, the same function in loka, and one training step of every family."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.data.batch import Jagged
from loka.models import build as build_model
from loka.models import configure, count
from loka.models.hstu import next_item_loss
from loka.models.onerec import Experts, semantic_id_loss

SIZE = {"n": 128, "d": 128, "k": 24, "hidden": 2048, "out": 32, "layers": 6}


class PlainBlock(nn.Module):
    """One Wukong layer as the equations read: linears over transposed vectors, torch's own layer norms."""

    def __init__(self, n: int, *, d: int, k: int, hidden: int, out: int) -> None:
        super().__init__()
        self.shape = (out, d)
        self.mixtures = nn.Parameter(torch.empty(n, k))
        self.product_norm = nn.LayerNorm(n * k)
        self.tower = nn.Sequential(
            nn.Linear(n * k, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, out * d)
        )
        self.compress = nn.Linear(n, out, bias=False)
        self.shortcut = nn.Linear(n, 2 * out, bias=False) if n != 2 * out else None
        self.norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        products = torch.bmm(x, torch.einsum("bnd,nk->bdk", x, self.mixtures)).flatten(1)
        made = self.tower(self.product_norm(products)).view(-1, *self.shape)
        turned = x.transpose(1, 2)
        kept = x if self.shortcut is None else self.shortcut(turned).transpose(1, 2)
        return self.norm(torch.cat([made, self.compress(turned).transpose(1, 2)], 1) + kept)


class PlainWukong(nn.Module):
    """The obvious layout, with the weights of a loka Wukong."""

    def __init__(self, twin: nn.Module) -> None:
        super().__init__()
        sizes = {name: SIZE[name] for name in ("d", "k", "hidden", "out")}
        counts = [SIZE["n"]] + [2 * SIZE["out"]] * (SIZE["layers"] - 1)
        self.blocks = nn.ModuleList(PlainBlock(n, **sizes) for n in counts)
        h = SIZE["hidden"]
        self.top = nn.Sequential(
            nn.Linear(2 * SIZE["out"] * SIZE["d"], h), nn.ReLU(), nn.Linear(h, h // 2), nn.ReLU(), nn.Linear(h // 2, 1)
        )
        self.copy_from(twin)

    @torch.no_grad()
    def copy_from(self, twin: Any) -> None:
        for mine, theirs in zip(self.blocks, twin.layers, strict=True):
            parts = theirs.mix.weight.split(list(theirs.mix.rows))
            mine.compress.weight.copy_(parts[0])
            mine.mixtures.copy_(parts[1].T)
            if mine.shortcut is not None:
                mine.shortcut.weight.copy_(parts[2])
            mine.product_norm.load_state_dict(theirs.fmb.norm.state_dict())
            mine.norm.load_state_dict(theirs.norm.state_dict())
            copy_tower(mine.tower, theirs.fmb.mlp)
        copy_tower(self.top, twin.head)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.top(x.flatten(1))


def copy_tower(mine: nn.Sequential, theirs: Any) -> None:
    linears = [layer.linear for layer in theirs.layers] + [theirs.last]
    for target, source in zip([m for m in mine if isinstance(m, nn.Linear)], linears, strict=True):
        target.load_state_dict(source.state_dict())


def build(case: str, device: str, *, scale: int, compiled: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A step to call, and facts about it."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if case.startswith("wukong-") and case != "wukong-row":
        return build_layout(case, device, scale, compiled)
    make = FAMILIES[case]
    return make(device, scale, compiled)


def build_on(device: str, *what: Any) -> Any:
    """A model whose weights are drawn where they live: a billion random numbers take a minute on a CPU."""
    with torch.device(device):
        return build_model(*what)


def build_layout(case: str, device: str, scale: int, compiled: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
    batch = max(2, 8192 // scale)
    ours = build_on(device, "wukong", "plain")
    facts: dict[str, Any] = {"batch": batch, "parameters": sum(p.numel() for p in ours.parameters())}
    model = ours
    if "plain" in case:
        with torch.device(device):
            model = PlainWukong(ours)
        facts["worst_difference"] = compare(ours, model, device)
    if case.endswith("infer"):
        return infer_step(model, batch, device, compiled), facts | {"flops": batch * count(ours).flops_forward}
    x = torch.randn(batch, SIZE["n"], SIZE["d"], device=device, requires_grad=True)
    run = compile_static(model, compiled)
    return train_step(lambda: run(x).float().square().mean(), [*model.parameters(), x], device), facts | {
        "flops": 3 * batch * count(ours).flops_forward
    }


@torch.no_grad()
def compare(ours: nn.Module, plain: nn.Module, device: str) -> float:
    """Largest difference of the two outputs in float32 over the spread of the outputs; more than a rounding is an error."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    x = torch.randn(64, SIZE["n"], SIZE["d"], device=device)
    a, b = ours(x), plain(x)
    torch.set_float32_matmul_precision(precision)
    difference = float((a - b).abs().max() / b.std())
    if difference > 1e-3:
        raise ValueError(
            f"the two layouts differ by {difference:.1e} of the outputs' spread; they should be one function"
        )
    return difference


def infer_step(model: nn.Module, batch: int, device: str, compiled: bool) -> Callable[[], Any]:
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    x = torch.randn(batch, SIZE["n"], SIZE["d"], device=device, dtype=torch.bfloat16)
    run = compile_static(model, compiled)
    return lambda: run(x)


def compile_static(model: Any, compiled: bool) -> Any:
    return torch.compile(model, fullgraph=True, dynamic=False) if compiled else model


def train_step(loss: Callable[[], Tensor], leaves: list[Any], device: str) -> Callable[[], Any]:
    """Forward and backward under bf16 autocast; gradients are dropped, as zero_grad does."""

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            value = loss()
        value.backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def core_case(
    family: str, size: str, batch: int, **overrides: Any
) -> Callable[..., tuple[Callable[[], Any], dict[str, Any]]]:
    """A ranking core on random vectors, which need a gradient as embeddings do."""

    def make(device: str, scale: int, compiled: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
        config = configure(family, size, **overrides)
        model = build_on(device, config)
        rows = max(2, batch // scale)
        inputs = [torch.randn(rows, config.n, config.d, device=device, requires_grad=True)]
        if family == "interformer":
            inputs.append(
                torch.randn(rows, config.length, config.histories * config.d, device=device, requires_grad=True)
            )
        lengths = [torch.randint(0, config.length + 1, (rows,), device=device)] if family == "interformer" else []
        target = (torch.rand(rows, config.labels, device=device) < 0.3).float()
        run = compile_static(model, compiled)

        def loss() -> Tensor:
            return F.binary_cross_entropy_with_logits(run(*inputs, *lengths).float(), target)

        facts = describe_model(model, rows, f"{family} {size} {overrides or ''}".strip())
        return train_step(loss, [*model.parameters(), *inputs], device), facts

    return make


def describe_model(model: nn.Module, rows: int, name: str) -> dict[str, Any]:
    cost = count(model)
    return {"model": name, "batch": rows, "parameters": cost.parameters, "flops": 3 * rows * cost.flops_forward}


def make_hstu(device: str, scale: int, compiled: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Every row as long as allowed, so that the counted FLOPs are the computed ones; the softmax is over all items."""
    config = configure("hstu", "base", items=8000, d=512, layers=4, heads=8, d_qk=64, d_v=64, max_length=512)
    model = build_on(device, config)
    rows, length = max(1, 64 // scale), config.max_length
    values = torch.randint(1, config.items, (rows * length,), device=device)
    history = Jagged(values, torch.arange(rows + 1, device=device) * length)
    times = torch.randint(0, 10**6, (rows, length), device=device).sort(1).values.flatten()
    run = compile_static(model, compiled)
    facts = describe_model(model, rows, "hstu base d=512 heads=8 length=512 items=8000")
    # The counter sees the reference, which multiplies the whole square; a causal kernel needs half of it.
    facts["flops"] -= 3 * rows * config.layers * length**2 * config.heads * (config.d_qk + config.d_v)
    return train_step(lambda: next_item_loss(run(history, times), history), list(model.parameters()), device), facts


def make_onerec(experts: Experts | None) -> Callable[..., tuple[Callable[[], Any], dict[str, Any]]]:
    def make(device: str, scale: int, compiled: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
        size = "0.5b" if experts is None else "4b-a0.5b"
        overrides = {"layers": 4, **({} if experts is None else {"experts": experts})}
        config = configure("onerec", size, **overrides)
        model = build_on(device, config)
        rows = max(1, 512 // scale)
        values = torch.randint(0, 8192, (rows * config.context, config.levels), device=device)
        history = Jagged(values, torch.arange(rows + 1, device=device) * config.context)
        goal = torch.randint(0, 8192, (rows, config.levels), device=device)
        run = compile_static(model, compiled)
        facts = describe_model(
            model, rows, f"onerec {size}, 4 layers" + ("" if experts is None else f", {experts.routed} experts")
        )
        return train_step(lambda: semantic_id_loss(run(history, goal), goal), list(model.parameters()), device), facts

    return make


FAMILIES: dict[str, Callable[..., tuple[Callable[[], Any], dict[str, Any]]]] = {
    "dlrm": core_case("dlrm", "large", 16384),
    "dcn": core_case("dcn", "large", 8192),
    "dhen": core_case("dhen", "large", 4096),
    "elfm": core_case("elfm", "large", 2048, dhen=configure("dhen", "tiny", layers=2, m=64, rank=4096), cross_layers=2),
    "interformer": core_case("interformer", "medium", 2048, layers=2),
    "hstu": make_hstu,
    "onerec": make_onerec(None),
    "onerec-moe": make_onerec(Experts(routed=53, top=3, hidden=1408, shared=1, dense_blocks=2)),
    "wukong-row": core_case("wukong", "8x48x3x4096", 4096, layers=4),
}
