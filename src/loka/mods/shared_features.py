"""shared_features: read the features x [B, n, d] of a layer once, for its products with mixtures and its compressions.

    bmm(x, x^T P),  lin(x^T)^T,  ...        ->        one kernel that reads x once (`loka.kernels.mixed_dots`)

In a layer of a Wukong each of these is a kernel that does little more than read x. Run after `feature_layout` and
`feature_products`, whose modules it lets share their input (`loka.mods.sharing`); only compiled code shares. An example
shows which modules read one unchanged tensor. Sums are in another order: rounding.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.mods.feature_layout import OverFeatures
from loka.mods.feature_products import OverFeaturesCalls
from loka.mods.sharing import SHARED, Matrix, SharedFeatures, SharesFeatures, WatchTransposes
from loka.nn.wrapping import find_holder
from loka.records.mods import ModClass
from loka.units.example import call_model
from loka.units.undisturbed import set_mode, undisturbed


class _Read(NamedTuple):
    """A module that read features."""

    name: str
    matrix: Tensor  # of a linear, its weight
    turned: bool  # whether the matrix is the transpose of a weight
    mixes: bool  # whether it is a linear over features
    x: Tensor
    version: int


class _Noting(SharedFeatures):
    """Stands in for the group of one module while an example runs: records what the module reads, shares nothing."""

    noting = True

    def __init__(self, name: str, reads: list[_Read]) -> None:
        self.name, self.reads = name, reads
        self.transposes: list[tuple[Tensor, Tensor]] = []

    def forget(self) -> None:
        """Keep what was recorded: versions tell what was written to."""

    def find_mixture(self, module: nn.Module, transposed: Tensor) -> Tensor | None:
        """Record that a linear over features reads a tensor."""
        for transpose, source in self.transposes:
            if transposed is transpose:
                self.reads.append(_Read(self.name, module.weight, False, True, source, source._version))  # type: ignore[arg-type]
        return None

    def find_products(self, x: Tensor, matrix: Tensor, turned: bool) -> Tensor | None:
        """Record that a tensor is multiplied by mixtures of itself."""
        self.reads.append(_Read(self.name, matrix, turned, False, x, x._version))
        return None


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
            if isinstance(module, OverFeatures) or (isinstance(module, OverFeaturesCalls) and module.loka_fuses)
        ]
        if len(readers) < 2 or editor.example is None:
            return
        parameters = {id(p): (module, key) for module in editor.model.modules() for key, p in module._parameters.items() if p is not None}  # fmt: skip
        holders: dict[str, list[tuple[SharedFeatures, list[str]]]] = {}
        for group in _find_groups(_run(editor, readers)):
            made = _make(group, parameters)
            if made is not None:
                names = [read.name for read in group]
                holders.setdefault(find_holder(names, editor.model), []).append((made, names))
        for holder, groups in holders.items():
            editor.mix(holder, SharesFeatures, loka_groups=tuple(made for made, _ in groups))
            for made, names in groups:
                for name in names:
                    editor.mark(name, SHARED, made)
            said = "; ".join(", ".join(names) for _, names in groups)
            editor.change(holder, f"reads features once, in compiled code, for {said}", "rounding")


def _run(editor: Editor, readers: list[tuple[str, nn.Module]]) -> list[_Read]:
    """Return what the modules read on the example. Tensors that are written to later are left out."""
    reads: list[_Read] = []
    noting = [_Noting(name, reads) for name, _ in readers]
    try:
        with undisturbed(editor.model), torch.no_grad(), ExitStack() as stack:
            for (_, module), one in zip(readers, noting, strict=True):
                module.__dict__[SHARED] = one
                stack.callback(module.__dict__.pop, SHARED)
            stack.enter_context(WatchTransposes(noting))
            set_mode(editor.model, False)
            call_model(editor.model, editor.example)
    except Exception as error:  # whatever a user's forward raises
        editor.leave("", f"the model failed on the example: {type(error).__name__}: {error}")
        return []
    return [read for read in reads if read.x._version == read.version]


def _find_groups(reads: list[_Read]) -> list[list[_Read]]:
    """Return the groups that read one tensor: one product and at least one linear, each called once."""
    names = [read.name for read in reads]
    groups: dict[int, list[_Read]] = {}
    for read in reads:
        if names.count(read.name) == 1:
            groups.setdefault(id(read.x), []).append(read)
    return [group for group in groups.values() if len(group) > 1 and sum(not read.mixes for read in group) == 1]


def _make(group: list[_Read], parameters: dict[int, Any]) -> SharedFeatures | None:
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
    return SharedFeatures(product, [matrix for mixes, matrix in matrices if mixes])
