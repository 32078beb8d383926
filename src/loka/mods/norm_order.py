"""norm_order: move the normalisation, so that what is quantised is normalised.

    pre        y = norm(x + f(x))       ->  y = x + f(norm(x))           the branch's linears read normalised values
    post       y = x + f(norm(x))       ->  y = norm(x + f(x))           the stream itself stays bounded
    epilogue   y = norm(act(W x))       ->  y = act(norm(W x))           linear, norm, activation: the order a GEMM's epilogue computes

"epilogue" is the default: it is what lets `fuse` take the three as one kernel, and the result is still bounded by sqrt(256), so a static scale holds. Which
of the first two is better is a matter of training; pre-norm stacks usually want one norm behind the last block, which this mod does not add.

The forward of the module that holds the norm is traced and rewritten (torch.fx), in an nn.Sequential too. Each is an architecture change: the parameters
stay, under their names, but compute another function. A norm between two widths (x and f(x) of different sizes) cannot move and is left.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx, nn

from loka.mods.editor import Editor
from loka.mods.graph import compile_forward, depends_on, is_addition, module_at, split_residual, trace
from loka.mods.norms import find_norms, refuse_norm
from loka.nn import BlockNorm, HardSwish
from loka.records.mods import ModClass

Order = Literal["epilogue", "pre", "post"]
_ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.Mish, HardSwish)


@dataclass(frozen=True)
class NormOrder:
    """to: where the norm goes."""

    to: Order = "epilogue"
    name: ClassVar[str] = "norm_order"
    effect: ClassVar[ModClass] = "architecture"

    def __post_init__(self) -> None:
        if self.to not in ("epilogue", "pre", "post"):
            raise ValueError(f"norm_order(to={self.to!r}): expected 'epilogue', 'pre' or 'post'")

    def rewrite(self, editor: Editor) -> None:
        """Every module that has a norm among its children."""
        kinds = (*find_norms(editor.model), BlockNorm)
        for name, module in editor.modules():
            norms = [child for child, part in module.named_children() if isinstance(part, kinds)]
            if not norms or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                continue
            graph = trace(module)
            if isinstance(graph, str):
                for child in norms:
                    editor.leave(f"{name}.{child}".lstrip("."), graph)
                continue
            moved = [
                what for node in list(graph.nodes) if (what := self._move(editor, name, module, graph, node, kinds))
            ]
            if moved:
                editor.reclass(name, compile_forward(module, graph), "; ".join(moved), "architecture")

    def _move(
        self,
        editor: Editor,
        name: str,
        module: nn.Module,
        graph: fx.Graph,
        node: fx.Node,
        kinds: tuple[type[nn.Module], ...],
    ) -> str | None:
        """Move one norm; what was done, or None where it stands in no such place."""
        norm = module_at(module, node)
        if not isinstance(norm, kinds) or len(node.all_input_nodes) != 1:
            return None
        move = {"epilogue": _before_activation, "pre": _before_branch, "post": _behind_sum}[self.to]
        why = refuse_norm(norm) or _refuse_shared(graph, node)
        done = None if why else move(graph, node, module)
        if done is None and _stands(module, node, self.to):
            editor.leave(f"{name}.{node.target}".lstrip("."), why or _SHAPES[self.to])
        return done


_SHAPES = {
    "epilogue": "the activation before it does not follow a linear, or is read elsewhere too",
    "pre": "the sum before it is no x + f(x), or is read elsewhere too",
    "post": "what it normalises is read by more than the branch",
}


def _refuse_shared(graph: fx.Graph, node: fx.Node) -> str | None:
    calls = [n for n in graph.nodes if n.op == "call_module" and n.target == node.target]
    return f"it is used {len(calls)} times in this forward" if len(calls) > 1 else None


def _stands(module: nn.Module, node: fx.Node, to: Order) -> bool:
    """Whether the norm is where this order would move it away from."""
    source = node.all_input_nodes[0]
    if to == "epilogue":
        return isinstance(module_at(module, source), _ACTIVATIONS)
    return is_addition(source) if to == "pre" else _find_sum(node) is not None


def _before_activation(graph: fx.Graph, node: fx.Node, module: nn.Module) -> str | None:
    act = node.all_input_nodes[0]
    linear = act.all_input_nodes[0] if isinstance(module_at(module, act), _ACTIVATIONS) else None
    if linear is None or not isinstance(module_at(module, linear), nn.Linear) or len(act.users) > 1:
        return None
    # norm(act(h)) -> act(norm(h)): the two nodes change places.
    node.replace_all_uses_with(act)
    node.args = (linear,)
    act.args = (node,)
    linear.append(node)
    return f"{node.target} now stands before {act.target}"


def _before_branch(graph: fx.Graph, node: fx.Node, module: nn.Module) -> str | None:
    add = node.all_input_nodes[0]
    sides = split_residual(add) if is_addition(add) and len(add.users) == 1 else None
    if sides is None:
        return None
    stream, branch = sides
    node.replace_all_uses_with(add)
    node.args = (stream,)
    for user in list(stream.users):
        if user is not node and user is not add and (user is branch or depends_on(branch, user)):
            user.replace_input_with(stream, node)
    stream.append(node)
    return f"{node.target} now stands before the branch (pre-norm)"


def _find_sum(node: fx.Node) -> fx.Node | None:
    """The addition x + f(norm(x)) that a norm's branch ends in, where the norm feeds nothing else."""
    stream = node.all_input_nodes[0]
    for user in stream.users:
        if is_addition(user) and user is not node:
            other = [a for a in user.args[:2] if a is not stream]
            if len(other) == 1 and isinstance(other[0], fx.Node) and depends_on(other[0], node):
                return user
    return None


def _behind_sum(graph: fx.Graph, node: fx.Node, module: nn.Module) -> str | None:
    add = _find_sum(node)
    if add is None:
        return None
    stream = node.all_input_nodes[0]
    if any(not (user is add or depends_on(add, user)) for user in node.users):
        return None
    node.replace_all_uses_with(stream)
    add.replace_all_uses_with(node)
    node.args = (add,)
    add.append(node)
    return f"{node.target} now stands behind the sum (post-norm)"
