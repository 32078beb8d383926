"""Chains: where a model runs linear, norm and activation one after another, and what stands right behind them.

A chain is found by tracing a module's forward, child by child (torch.fx): an MLP, an nn.Sequential, or anything whose forward is one straight line. What lies
around it, a norm before or behind it, is read off the flow of one run (`loka.mods.flow`). Nothing is changed here; `loka.mods.fuse` does that.
"""

from dataclasses import dataclass

from torch import nn

from loka.mods.editor import Editor
from loka.mods.flow import Call, Flow
from loka.mods.graph import trace
from loka.mods.norms import find_norms
from loka.mods.protect_intermediates import is_protected
from loka.nn import BLOCK, EPS, BlockNorm, HardSwish

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    HardSwish: "hard_swish",
    nn.Hardswish: "hard_swish",
}
_OTHERS = (nn.GELU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU)


@dataclass(frozen=True)
class ChainLink:
    """Names, inside the chain's module, of a linear and of what follows it."""

    linear: str
    norm: str | None = None
    activation: str | None = None


@dataclass(frozen=True)
class Chain:
    """A straight line of links in the module `site`, then modules that are run as they are."""

    site: str
    links: tuple[ChainLink, ...]
    tail: tuple[str, ...] = ()
    bounded_input: bool = False  # x comes out of a BlockNorm: no value beyond 16

    def names(self) -> tuple[str, ...]:
        """Every part in the order it runs."""
        links = [(link.linear, link.norm, link.activation) for link in self.links]
        return (*(name for link in links for name in link if name is not None), *self.tail)


class Absorbed(nn.Identity):
    """Stands where a BlockNorm stood that now runs inside the tower before it: what it hands on is still bounded."""


def unroll(module: nn.Module) -> list[str] | str:
    """Names of the atoms a module runs one after another, or why it is no straight line."""
    graph = trace(module)
    if isinstance(graph, str):
        return graph
    names: list[str] = []
    at = None
    for node in graph.nodes:
        if node.op == "placeholder" and at is None:
            at = node
        elif (
            node.op == "call_module"
            and node.args == (at,)
            and not node.kwargs
            and at is not None
            and len(at.users) == 1
        ):
            child = module.get_submodule(str(node.target))
            inner = [""] if next(child.children(), None) is None else unroll(child)
            if isinstance(inner, str):
                return f"{node.target}: {inner}"
            names += [f"{node.target}.{name}".rstrip(".") for name in inner]
            at = node
        elif node.op != "output" or node.args != (at,):
            return f"its forward is no straight line: {node.format_node()}"
    return names


def find_chain(editor: Editor, site: str, module: nn.Module, names: list[str]) -> Chain | str:
    """The chain that a straight line of atoms is, or why it is none."""
    norms = (*find_norms(editor.model), BlockNorm)
    links: list[ChainLink] = []
    tail: list[str] = []
    for name in names:
        part = module.get_submodule(name)
        last = links[-1] if links else None
        if isinstance(part, nn.Identity):
            continue
        if isinstance(part, nn.Linear) and not tail and not is_kept(editor, f"{site}.{name}".lstrip("."), part):
            links.append(ChainLink(name))
        elif last is None:
            return f"it begins with {name} ({type(part).__name__}), which stays as it is"
        elif isinstance(part, norms) and last.norm is None and last.activation is None and not tail:
            links[-1] = ChainLink(last.linear, name)
        elif isinstance(part, (*ACTIVATIONS, *_OTHERS)) and last.activation is None and not tail:
            links[-1] = ChainLink(last.linear, last.norm, name)
        else:
            tail.append(name)
    if not links or (len(links) == 1 and links[0].norm is None and links[0].activation is None):
        return "there is nothing to fuse: no linear with a norm, an activation or another linear behind it"
    rest = [(name, module.get_submodule(name)) for name in tail]
    if any(isinstance(m, nn.Linear) and not is_kept(editor, f"{site}.{n}".lstrip("."), m) for n, m in rest):
        return f"after {tail[0]} ({type(rest[0][1]).__name__}) there are more linears: the chain is broken there; {_hint(rest[0][1], norms)}"
    return Chain(site, tuple(links), tuple(tail), is_bounded(editor, f"{site}.{links[0].linear}".lstrip(".")))


def _hint(part: nn.Module, norms: tuple[type[nn.Module], ...]) -> str:
    if isinstance(part, norms):
        return "hint: norm_order puts a norm before its activation"
    return "hint: the kernels know a norm and an activation behind a linear, in this order, and nothing else"


def is_kept(editor: Editor, name: str, linear: nn.Linear) -> bool:
    """Prediction layers and protected linears run as they are."""
    return name in editor.prediction or is_protected(linear, name)


def is_bounded(editor: Editor, linear: str) -> bool:
    """Whether every input of a linear came out of a BlockNorm, reshaped or activated at most."""
    flow = editor.flow
    if not isinstance(flow, Flow) or not flow.calls_of(linear):
        return False
    return all(_comes_from_norm(editor, flow, flow.maker(call.inputs[0])) for call in flow.calls_of(linear))


def _comes_from_norm(editor: Editor, flow: Flow, call: Call | None) -> bool:
    while call is not None:
        if call.site is None and call.op not in ("view", "_unsafe_view", "clone", "_to_copy", "alias", "detach"):
            return False
        if call.site is not None:
            module = editor.model.get_submodule(call.site)
            if isinstance(module, Absorbed):
                return True
            if isinstance(module, BlockNorm):
                return module.block <= BLOCK
            if not isinstance(module, (*ACTIVATIONS, nn.Identity, nn.Flatten)):
                return False
        call = flow.maker(call.inputs[0])
    return False


def is_kernel_norm(norm: nn.Module) -> bool:
    """Whether the kernels know this norm."""
    return isinstance(norm, BlockNorm) and norm.block == min(BLOCK, norm.width) and norm.eps == EPS


def find_activation(editor: Editor, linear: str) -> str | None:
    """The activation that alone reads what a linear makes, and reads nothing else."""
    site = _find_reader(editor, linear)
    return site if site is not None and type(editor.model.get_submodule(site)) in ACTIVATIONS else None


def find_norm(editor: Editor, chain: Chain) -> str | None:
    """The BlockNorm that alone reads what a chain makes, where its last linear has nothing of its own behind it."""
    last = chain.links[-1]
    if chain.tail or last.norm is not None or last.activation is not None:
        return None
    site = _find_reader(editor, f"{chain.site}.{last.linear}")
    return site if site is not None and is_kernel_norm(editor.model.get_submodule(site)) else None


def _find_reader(editor: Editor, linear: str) -> str | None:
    """The module that alone reads what a linear makes, reads nothing else, and may be changed."""
    flow = editor.flow
    calls = flow.calls_of(linear) if isinstance(flow, Flow) else []
    if len(calls) != 1 or not isinstance(flow, Flow) or calls[0].outputs[0] in flow.results:
        return None
    readers = flow.readers(calls[0].outputs[0])
    site = readers[0].site if len(readers) == 1 else None
    return site if site is not None and len(flow.calls_of(site)) == 1 and editor.may_change(site) else None
