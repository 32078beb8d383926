"""What benchmarks/fp8_models.py measures: one model, one mode, one precision."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models_cases import build_on, compile_static
from torch import Tensor, nn

from loka.models import configure, count
from loka.models.wukong import FactorizationMachineBlock, Wukong, WukongLayer
from loka.nn import MLP, FusedInteraction, FusedTower, Link, Style, freeze, refuse_interaction

MODS = Style(norm="block", activation="hard_swish", bias=False, tower_norm="block")
SIZES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "wukong": ("wukong", "plain", 8192, {}),
    "wukong8k": ("wukong", "8x96x3x8192", 4096, {"layers": 2}),
    "dlrm": ("dlrm", "large", 16384, {}),
    "dcn": ("dcn", "large", 8192, {}),
    "dhen": ("dhen", "large", 4096, {}),
    "elfm": (
        "elfm",
        "large",
        2048,
        {"dhen": configure("dhen", "tiny", layers=2, m=64, rank=4096, style=MODS), "cross_layers": 2},
    ),
    "interformer": ("interformer", "medium", 2048, {"layers": 2}),
}


def build(case: str, device: str, *, scale: int, compiled: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A step to call, and facts about it."""
    name, mode, precision = case.split("-", 2)
    family, size, batch, overrides = SIZES[name]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    config = configure(family, "tiny" if scale > 1 else size, **({} if scale > 1 else overrides), style=MODS)
    model = build_on(device, config)
    rows = max(16, batch // scale)
    inputs, lengths = draw_inputs(config, family, rows, device)
    flops = rows * count(model).flops_forward * (3 if mode == "train" else 1)
    facts: dict[str, Any] = {
        "model": f"{family} {size} {overrides or ''}".strip(),
        "batch": rows,
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops": flops,
    }
    reference = copy.deepcopy(model) if precision not in ("fp32", "tf32", "bf16") else None
    if mode == "infer":
        model = model.eval().requires_grad_(False)
        if precision not in ("fp32", "tf32"):
            model, inputs = model.to(torch.bfloat16), [x.detach().to(torch.bfloat16) for x in inputs]
    facts |= lower(model, precision, mode)
    if reference is not None:
        facts["difference"] = difference(model, reference, inputs, lengths, mode, device)
        if mode == "train":
            facts["gradient_difference"] = gradient_difference(model, reference, inputs, lengths, device)
        del reference
    run = compile_static(model, compiled)
    if mode == "infer":
        return graphed(lambda: infer(run, inputs, lengths), device), facts
    return graphed(train(run, model, inputs, lengths, precision, device), device), facts


def graphed(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The step as a CUDA graph from its third call on: what is timed is the GPU, for every precision alike, not Python's launches."""
    if device != "cuda":
        return step
    state: dict[str, Any] = {"calls": 0}

    def run() -> None:
        state["calls"] += 1
        if state["calls"] <= 2:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if "graph" not in state:
            torch.cuda.synchronize()
            state["graph"] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(state["graph"]):
                step()
        state["graph"].replay()

    return run


def draw_inputs(config: Any, family: str, rows: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Random feature vectors, which need a gradient as embeddings do."""
    inputs = [torch.randn(rows, config.n, config.d, device=device, requires_grad=True)]
    if family != "interformer":
        return inputs, []
    inputs.append(torch.randn(rows, config.length, config.histories * config.d, device=device, requires_grad=True))
    return inputs, [torch.randint(0, config.length + 1, (rows,), device=device)]


def lower(model: nn.Module, precision: str, mode: str) -> dict[str, Any]:
    """Put the model into low precision, in place; says how much of it."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = {name for name, module in linears.items() if module.out_features >= 16 and module.in_features >= 16}
    if precision == "loka":
        facts = {"towers": fuse_towers(model), "linears": len(linears)}
        if mode == "infer":
            freeze(model, offload=True)
        return facts | {"interactions": fuse_interactions(model)}
    if precision.startswith("torchao"):
        recipe = precision.removeprefix("torchao-")
        if mode == "train":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(
                model,
                config=Float8LinearConfig.from_recipe_name(recipe),
                module_filter_fn=lambda module, name: name in wanted,
            )
        else:
            from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

            granularity = PerRow() if recipe == "rowwise" else PerTensor()
            quantize_(
                model,
                Float8DynamicActivationFloat8WeightConfig(granularity=granularity),
                filter_fn=lambda module, name: isinstance(module, nn.Linear) and name in wanted,
            )
        return {"converted": len(wanted), "linears": len(linears)}
    return {}


def fuse_towers(model: nn.Module) -> int:
    """Every MLP whose layers are linear, BlockNorm, hard swish; a prediction layer narrower than 16 stays as it is."""
    towers = [(name, module) for name, module in model.named_modules() if isinstance(module, MLP)]
    for name, tower in towers:
        links = [Link(f"layers.{index}.linear") for index in range(len(tower.layers))]
        tail: list[str] = []
        if isinstance(tower.last, nn.Linear):
            if tower.last.out_features >= 16:
                links.append(Link("last", 0, "none"))
            else:
                tail.append("last")
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        # In Wukong every tower reads what a BlockNorm wrote: the norm of the products, or the norm of the last layer.
        bounded = isinstance(parent, (FactorizationMachineBlock, Wukong))
        if links:
            setattr(parent, child, FusedTower.replacing(tower, links, tail=tail, bounded_input=bounded))
    return len(towers)


def fuse_interactions(model: nn.Module) -> int:
    """Wukong layers whose examples fit into a program of the interaction kernel."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, WukongLayer)]
    fitting = [(name, layer) for name, layer in layers if refuse_interaction(layer) is None]
    for name, layer in fitting:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, FusedInteraction.replacing(layer))
    return len(fitting)


@torch.no_grad()
def difference(
    model: nn.Module, reference: nn.Module, inputs: list[Tensor], lengths: list[Tensor], mode: str, device: str
) -> float:
    """Relative L2 of the representation before the prediction layer against float32, on the first rows."""
    first = min(512, inputs[0].shape[0])
    few, lens = [x[:first] for x in inputs], [x[:first] for x in lengths]
    with torch.autocast(device, torch.bfloat16, enabled=mode == "train"):
        mine = model.represent(*few, *lens) if not lengths else model(*few, *lens)
    theirs_in = [x.float() for x in few]
    theirs = reference.represent(*theirs_in, *lens) if not lengths else reference(*theirs_in, *lens)
    error = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
    if not error < 0.5:
        raise ValueError(f"the low-precision model differs from the float32 one by {error:.2f} of its output")
    return error


def gradient_difference(
    model: nn.Module, reference: nn.Module, inputs: list[Tensor], lengths: list[Tensor], device: str
) -> float:
    """Relative L2 of all parameters' gradients against float32's, on the first rows; a wrong backward is not worth timing."""
    first = min(512, inputs[0].shape[0])
    lens = [x[:first] for x in lengths]
    gradients = []
    for which in (model, reference):
        with torch.autocast(device, torch.bfloat16, enabled=which is model):
            out = which(*(x[:first].detach() for x in inputs), *lens)
        out.float().square().mean().backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in which.parameters() if p.grad is not None]))
        which.zero_grad()
    error = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    if not error < 0.5:
        raise ValueError(f"its gradients differ from the float32 ones by {error:.2f}")
    return error


@torch.no_grad()
def infer(run: Any, inputs: list[Tensor], lengths: list[Tensor]) -> Tensor:
    return run(*inputs, *lengths)


def train(
    run: Any, model: nn.Module, inputs: list[Tensor], lengths: list[Tensor], precision: str, device: str
) -> Callable[[], Any]:
    rows = inputs[0].shape[0]
    target = (torch.rand(rows, 1, device=device) < 0.3).float()
    leaves = [*model.parameters(), *inputs]

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision not in ("fp32", "tf32")):
            logits = run(*inputs, *lengths)
        loss = F.binary_cross_entropy_with_logits(logits.float()[:, :1], target)
        loss.backward()
        for leaf in leaves:
            leaf.grad = None

    return step
