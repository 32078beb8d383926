"""fuse: chains of linear, norm and activation become one module.

    [linear -> BlockNorm -> activation]*  (-> last linear)

With precision="high" (the default) the chain runs its own children one after another: exactly what it replaces, bit by bit, under one name. With
precision="fp8" it becomes a `loka.nn.FusedTower`: every layer one kernel, whose epilogue normalises, activates and writes FP8 for the next layer, so that no
quantisation pass is left between them. The children stay where they were, so the state_dict does not change either way.

How chains are found is in `loka.mods.chain`. FP8 needs a BlockNorm of 256 behind every linear but the last (apply block_norm first), activations the kernels
know, and no dropout in between. A prediction layer at the end of a chain runs as it is.

With `norms=True` a BlockNorm outside of a chain that alone reads its last linear moves into that linear's kernel. The chain then returns normalised numbers: right for what was seen
in one run of the model, wrong for whatever else reads the chain (an auxiliary loss in training, another entry point). So it must be asked for.

With `linears=N` the linears that are in no chain and have at least N inputs and outputs become `loka.nn.FusedProjection`, together with the activation that
alone reads them: an attention's projections, HSTU's uvqk. Narrow ones lose: at K = 128 a bf16 GEMM already waits for memory.

`fuse` comes last: a mod that swaps the children of a fused chain would not reach what it runs. Linears inside an FP8 chain are marked as protected, so
that Probe and convert do not count them twice.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from loka.mods.align_shapes import is_aligned
from loka.mods.chain import (
    ACTIVATIONS,
    Absorbed,
    Chain,
    find_activation,
    find_chain,
    find_norm,
    is_bounded,
    is_kept,
    is_kernel_norm,
    unroll,
)
from loka.mods.editor import Editor
from loka.mods.journal import has_hooks
from loka.mods.protect_intermediates import MARK
from loka.nn import (
    BLOCK,
    EPS,
    FeatureMix,
    FusedInteraction,
    FusedProjection,
    FusedTower,
    Link,
    TowerPrecision,
    refuse_interaction,
)
from loka.records.mods import ModClass


class ChainForward(nn.Module):
    """Mixed in front of a module's own class: its parts, one after another."""

    def forward(self, x: Tensor) -> Tensor:
        """What the parts compute."""
        for part in self._chain_parts:
            x = part(x)
        return x

    _chain_parts: tuple[nn.Module, ...]


def make_fused(chain: Chain, module: nn.Module, precision: TowerPrecision, *, normalized: bool = False) -> FusedTower:
    """The FP8 tower of a chain; raises where the kernels cannot do what the chain does. `normalized`: with a BlockNorm behind its last linear."""
    links = []
    for link in chain.links:
        norm = None if link.norm is None else module.get_submodule(link.norm)
        if norm is None and link is not chain.links[-1]:
            raise ValueError(
                f"{link.linear} has no norm behind it: nothing bounds what it hands on, so no static scale is safe; "
                "hint: give the model a norm there"
            )
        if norm is not None and not is_kernel_norm(norm):
            raise ValueError(f"{link.norm} is {norm}, the kernels know BlockNorm with blocks of {BLOCK} and eps {EPS}")
        activation = "none"
        if link.activation is not None:
            kind = type(module.get_submodule(link.activation))
            if kind not in ACTIVATIONS:
                raise ValueError(
                    f"{link.activation} is {kind.__name__}, the kernels know {', '.join(ACTIVATIONS.values())}"
                )
            activation = ACTIVATIONS[kind]
        links.append(Link(link.linear, BLOCK if norm is not None else 0, activation))
    if normalized:
        links[-1] = Link(links[-1].linear, BLOCK, "none")
    return FusedTower.replacing(module, links, tail=chain.tail, bounded_input=chain.bounded_input, precision=precision)


@dataclass(frozen=True)
class Fuse:
    """precision: "high" runs the parts as they are; "fp8" runs `loka.nn.FusedTower`, with gradients scaled per "tensor" or per "block" of 128.

    linears: with "fp8", the narrowest linear outside of a chain that is fused too; 0 leaves them all. norms: with "fp8", a norm that alone reads a chain runs inside it.
    """

    precision: Literal["high", "fp8"] = "high"
    gradient: Literal["tensor", "block"] = "tensor"
    linears: int = 0
    norms: bool = False
    name: ClassVar[str] = "fuse"
    separable: ClassVar[bool] = False  # what a kernel took over and what no longer runs itself go together
    effect: ClassVar[ModClass] = "rounding"

    def __post_init__(self) -> None:
        if self.precision not in ("high", "fp8"):
            raise ValueError(f"fuse(precision={self.precision!r}): expected 'high' or 'fp8'")
        if self.linears < 0 or (self.linears and self.precision == "high"):
            raise ValueError(
                f"fuse(linears={self.linears}, precision={self.precision!r}): expected a width, and precision='fp8'"
            )
        if self.norms and self.precision == "high":
            raise ValueError(
                "fuse(norms=True, precision='high'): a norm moves into an FP8 kernel; expected precision='fp8'"
            )
        TowerPrecision(gradient=self.gradient)  # refuses what it does not know

    def rewrite(self, editor: Editor) -> None:
        """The outermost modules that are chains."""
        done: list[str] = []
        for name, module in editor.modules():
            inside = any(name.startswith(f"{outer}.") or outer == "" for outer in done)
            if inside or not _holds_linear(module):
                continue
            names = unroll(module)
            if isinstance(names, str):
                if _looks_like_chain(module):
                    editor.leave(name, names)
                continue
            if not isinstance(_first(module, names), nn.Linear):
                continue  # something stands before the chain: a module inside may be one
            chain = find_chain(editor, name, module, names)
            if name or self.precision == "high":
                done.append(name)  # its parts are not looked at again: a broken chain is not fused in pieces
            why = chain if isinstance(chain, str) else self._refuse(editor, chain, module)
            if why:
                editor.leave(name, why)
            elif isinstance(chain, Chain):
                self._fuse(editor, chain, module)
        if self.precision == "fp8":
            if self.linears:
                self._fuse_linears(editor)
            self._fuse_interactions(editor)

    def _fuse_linears(self, editor: Editor) -> None:
        """Linears that are in no chain, each with the activation behind it."""
        for name, linear in list(editor.modules()):
            if not isinstance(linear, nn.Linear) or (type(linear) is not nn.Linear and not is_aligned(linear)):
                continue
            if is_kept(editor, name, linear):
                continue
            if min(linear.in_features, linear.out_features) < self.linears:
                editor.leave(name, f"{linear.in_features} x {linear.out_features}: narrower than {self.linears}")
            elif len(editor.calls(name)) > 1 or editor.is_tied(linear):
                editor.leave(name, "it is used more than once, or shares its weight")
            elif not name:
                editor.leave(
                    name, "the model is itself a linear and cannot be swapped in place; wrap it in nn.Sequential"
                )
            else:
                self._fuse_linear(editor, name, linear)

    def _fuse_linear(self, editor: Editor, name: str, linear: nn.Linear) -> None:
        behind = find_activation(editor, name)
        kind = "none" if behind is None else ACTIVATIONS[type(editor.model.get_submodule(behind))]
        bounded, precision = is_bounded(editor, name), TowerPrecision(gradient=self.gradient)
        projection = FusedProjection.of(linear, activation=kind, bounded_input=bounded, precision=precision)
        scale = "static" if bounded else "dynamic"
        editor.swap(name, projection, f"one FP8 linear, {scale} scale for its input, activation {kind}", "rounding")
        if behind is not None:
            editor.swap(behind, nn.Identity(), f"runs inside {name}", "exact")

    def _fuse_interactions(self, editor: Editor) -> None:
        """Wukong's layers, whose interactions cost more than an FP8 tower: one node around the tower."""
        for name, module in list(editor.modules()):
            if not isinstance(getattr(module, "mix", None), FeatureMix) or not hasattr(module, "fmb") or not name:
                continue
            why = refuse_interaction(module)
            if why:
                editor.leave(name, f"its interactions are not fused: {why}")
            else:
                what = "mixtures, products and norms around the tower: two kernels forward, two backward"
                editor.swap(name, FusedInteraction.replacing(module), what, "rounding")

    def _refuse(self, editor: Editor, chain: Chain, module: nn.Module) -> str | None:
        if any(len(editor.calls(f"{chain.site}.{link.linear}".lstrip("."))) > 1 for link in chain.links):
            return "one of its linears is used more than once"
        linears = [module.get_submodule(link.linear) for link in chain.links]
        if any(editor.is_tied(linear) for linear in linears):
            return "one of its linears shares its weight"
        if any(type(linear) is not nn.Linear and not is_aligned(linear) for linear in linears):
            return "one of its linears is more than an nn.Linear"
        hooked = [name for name in chain.names() if has_hooks(module.get_submodule(name))]
        if self.precision == "fp8" and hooked:
            return f"a hook on {hooked[0]} would not run inside a kernel; hint: remove it (probe.detach()), block_norm before norm_order, or precision='high'"
        if self.precision == "fp8" and not chain.site:
            return "the model is itself a chain and cannot be swapped in place; wrap it in nn.Sequential"
        return None

    def _fuse(self, editor: Editor, chain: Chain, module: nn.Module) -> None:
        parts = " -> ".join(type(module.get_submodule(name)).__name__ for name in chain.names())
        if self.precision == "high":
            atoms = tuple(module.get_submodule(name) for name in chain.names())
            editor.mix(chain.site, ChainForward, _chain_parts=atoms)
            editor.change(chain.site, f"one chain: {parts}", "exact")
            return
        try:
            behind = find_norm(editor, chain) if self.norms else None
            tower = make_fused(chain, module, TowerPrecision(gradient=self.gradient), normalized=behind is not None)
        except ValueError as error:
            editor.leave(chain.site, str(error))
            return
        for link in chain.links:
            editor.mark(f"{chain.site}.{link.linear}", MARK, "fused")
        bounded = "static" if chain.bounded_input else "dynamic"
        parts += "" if behind is None else f" -> {behind}"
        editor.swap(chain.site, tower, f"one FP8 tower, {bounded} scale for its input: {parts}", "rounding")
        if behind is not None:
            editor.swap(behind, Absorbed(), f"runs inside {chain.site}, whose output is normalised now", "rounding")
            editor.note(f"{chain.site} returns what {behind} returned: nothing else may read it")


def _first(module: nn.Module, names: list[str]) -> nn.Module | None:
    parts = (module.get_submodule(name) for name in names)
    return next((part for part in parts if not isinstance(part, nn.Identity)), None)


def _holds_linear(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Linear) for part in module.modules()) and not isinstance(module, nn.Linear)


def _looks_like_chain(module: nn.Module) -> bool:
    """Modules of which a reader would expect it."""
    return isinstance(module, nn.Sequential) or type(module).__name__ in ("MLP", "Layer")
