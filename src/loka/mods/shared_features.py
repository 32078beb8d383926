"""shared_features: read the features x [B, n, d] of a layer once, for its products with mixtures and its compressions.

    bmm(x, x^T P),  lin(x^T)^T,  ...        ->        one kernel that reads x once (`loka.kernels.mixed_dots`)

In a layer of a Wukong each of these is a kernel that does little more than read x. Run after `feature_layout` and
`feature_products`, whose modules it lets share their input (`loka.mods.sharing`); only compiled code shares. An example
shows which modules read one unchanged tensor. Where the forward may leave out one of their results, or keeps gradients
from it, they share in inference only. Sums are in another order: rounding.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from loka.mods.calling import find_saving_hooks
from loka.mods.editor import Editor
from loka.mods.feature_layout import OverFeatures
from loka.mods.feature_products import OverFeaturesCalls
from loka.mods.sharing import SHARED, Matrix, SharedFeatures, SharesFeatures, Transpose
from loka.nn.sharing import Recorded, Watch, each
from loka.nn.wrapping import find_holder
from loka.records.mods import ModClass
from loka.units.example import call_model, tensors_in
from loka.units.undisturbed import set_mode, undisturbed


class _Read(NamedTuple):
    """A module that read features."""

    name: str
    matrix: Tensor  # of a linear, its weight
    turned: bool  # whether the matrix is the transpose of a weight
    mixes: bool  # whether it is a linear over features
    x: Tensor
    version: int
    saving: Any  # the hook of the checkpoint around it, or None: a compiler lets nothing out of a checkpoint


class _Noting(SharedFeatures):
    """Stands in for the group of one module while an example runs: records what the module reads, shares nothing."""

    noting = True

    def __init__(self, name: str, reads: list[_Read]) -> None:
        self.name, self.reads = name, reads
        self.transposes: Recorded[Transpose] = ()

    def forget(self) -> None:
        """Keep what was recorded: versions tell what was written to."""

    def find_mixture(self, module: nn.Module, transposed: Tensor) -> Tensor | None:
        """Record that a linear over features reads a tensor."""
        for transpose, source, _ in each(self.transposes):
            if transposed is transpose:
                self._note(module.weight, False, True, source)  # type: ignore[arg-type]
        return None

    def find_products(self, x: Tensor, matrix: Tensor, turned: bool) -> Tensor | None:
        """Record that a tensor is multiplied by mixtures of itself."""
        self._note(matrix, turned, False, x)
        return None

    def _note(self, matrix: Tensor, turned: bool, mixes: bool, x: Tensor) -> None:
        self.reads.append(_Read(self.name, matrix, turned, mixes, x, x._version, find_saving_hooks()))


@dataclass(frozen=True)
class ShareFeatures:
    """Let modules that read the same features compute their results in one pass. No options.

    Example:
        >>> loka.mods.apply(model, ["feature_layout", "feature_products", "shared_features"], example=batch)
    """

    name: ClassVar[str] = "shared_features"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Find the modules that read one tensor, and let each group share it."""
        readers = [
            (name, module)
            for name, module in editor.modules()
            if (isinstance(module, OverFeatures) or (isinstance(module, OverFeaturesCalls) and module.loka_fuses))
            and SHARED not in module.__dict__
        ]
        if len(readers) < 2 or editor.example is None:
            return
        parameters = {id(p): (module, key) for module in editor.model.modules() for key, p in module._parameters.items() if p is not None}  # fmt: skip
        holders: dict[str, list[tuple[SharedFeatures, list[str]]]] = {}
        reads, reached = _run(editor, readers)
        for group in _find_groups(reads):
            names = [read.name for read in group]
            made = _make(group, parameters, trains=_always_trains(editor, group, reached))
            if made is not None:
                holders.setdefault(find_holder(names, editor.model), []).append((made, names))
        for holder, groups in holders.items():
            editor.mix(holder, SharesFeatures, loka_groups=tuple(made for made, _ in groups))
            for made, names in groups:
                for name in names:
                    editor.mark(name, SHARED, made)
            said = "; ".join(", ".join(names) for _, names in groups)
            editor.change(holder, f"reads features once, in compiled code, for {said}", "rounding")


def _run(editor: Editor, readers: Sequence[tuple[str, nn.Module]]) -> tuple[list[_Read], set[int]]:
    """Return what the modules read on the example, and the ids of the parameters that its output has gradients for.

    Tensors that are written to later are left out.
    """
    reads: list[_Read] = []
    noting = [_Noting(name, reads) for name, _ in readers]
    try:
        with undisturbed(editor.model), torch.enable_grad(), ExitStack() as stack:
            for (_, module), one in zip(readers, noting, strict=True):
                module.__dict__[SHARED] = one
                stack.callback(module.__dict__.pop, SHARED)
            stack.enter_context(Watch(noting))
            set_mode(editor.model, False)
            reached = _find_reached(call_model(editor.model, editor.example))
    except Exception as error:  # whatever a user's forward raises
        editor.leave("", f"the model failed on the example: {type(error).__name__}: {error}")
        return [], set()
    return [read for read in reads if read.x._version == read.version], reached


def _find_reached(output: Any) -> set[int]:
    """Return the ids of the leaves that a backward from the output would reach. None is run."""
    waiting = [tensor.grad_fn for tensor in tensors_in(output)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(before for before, _ in node.next_functions)
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def _always_trains(editor: Editor, group: list[_Read], reached: set[int]) -> bool:
    """Check that every forward uses all results, and that gradients flow through all of them."""
    if any(read.matrix.requires_grad and id(read.matrix) not in reached for read in group):
        return False
    # a linear is called by the module around it, products are computed in the module's own forward
    sites = [read.name if read.mixes else f"{read.name}.product" for read in group]
    return editor.find_branch(*sites) is None


def _find_groups(reads: list[_Read]) -> list[list[_Read]]:
    """Return the groups that read one tensor: one product and at least one linear, each called once."""
    names = [read.name for read in reads]
    groups: dict[tuple[int, int], list[_Read]] = {}
    for read in reads:
        if names.count(read.name) == 1:
            groups.setdefault((id(read.x), id(read.saving)), []).append(read)
    return [group for group in groups.values() if len(group) > 1 and sum(not read.mixes for read in group) == 1]


def _make(group: list[_Read], parameters: dict[int, Any], *, trains: bool) -> SharedFeatures | None:
    """Return the group's shared state; None if a matrix is no parameter, or a hook may change one before it is used."""
    matrices = []
    for read in group:
        if id(read.matrix) not in parameters:
            return None
        module, key = parameters[id(read.matrix)]
        if module._forward_pre_hooks:
            return None
        matrices.append((read.mixes, Matrix(module, key, tuple(read.matrix.shape), read.turned)))
    product = next(matrix for mixes, matrix in matrices if not mixes)
    return SharedFeatures(product, [matrix for mixes, matrix in matrices if mixes], trains=trains)
