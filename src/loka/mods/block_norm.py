"""block_norm: replace LayerNorm and RMSNorm by a parameter-free RMSNorm over fixed blocks of 256 features.

    BlockNorm(x)_c = x_c / rms(the block of c)          every output of a full block is bounded by 16

Why: a block fits into one tile of a GEMM, so the norm can run in its epilogue; no mean is subtracted, so nothing
cancels; and the bound makes a static FP8 scale safe. A width below 256 is one block, and the last block may be
narrower. A norm over d of (B, n, d) stays a norm over d.

If only linears read the old norm's output, its gain g and shift s move into them: W <- W diag(g), b <- b + W s, which
is exact. Otherwise they are dropped, and the summary says why. The readers are taken from a run on the example in eval
and training mode. If the forward may branch, the result is not claimed to be the same function. An RMSNorm over at most
256 features whose gain moved computes the same as before, up to rounding. Everything else is an architecture change.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.mods.journal import Fold
from loka.mods.norms import epsilon_of, find_norms, find_width, is_rms, refuse_formula, refuse_norm
from loka.nn import BLOCK, EPS, BlockNorm
from loka.records.mods import ModClass


@dataclass(frozen=True)
class UseBlockNorm:
    """Replace LayerNorm and RMSNorm by a parameter-free RMSNorm over blocks of features.

    Args:
        block: features per block.
        fold: move gains and shifts into the next linear where that is exact.

    Example:
        >>> loka.mods.apply(model, [UseBlockNorm()], example=batch)
    """

    block: int = BLOCK
    fold: bool = True
    name: ClassVar[str] = "block_norm"
    effect: ClassVar[ModClass] = "architecture"

    def __post_init__(self) -> None:
        if self.block < 2:
            raise ValueError(
                f"block_norm(block={self.block}): a block of one feature keeps only its sign; expected >= 2"
            )

    def rewrite(self, editor: Editor) -> None:
        """Replace every norm over features."""
        for name, norm in editor.modules(*find_norms(editor.model)):
            if why := refuse_norm(norm):
                editor.leave(name, why)
                continue
            width = find_width(editor, name, norm)
            if width is None:
                editor.leave(name, "the width of its input is not known; pass example=, or give it a weight")
            elif not name:
                editor.leave(
                    name, "the model is itself a norm and cannot be swapped in place; wrap it in nn.Sequential"
                )
            elif why := refuse_formula(norm, width):
                editor.leave(name, why)
            else:
                self._replace(editor, name, norm, width)

    def _replace(self, editor: Editor, name: str, norm: nn.Module, width: int) -> None:
        moved, same = self._move_affine(editor, name, norm)
        eps = self._choose_eps(norm)
        rms = is_rms(norm)
        effect: ModClass = "rounding" if same and rms and width <= self.block else "architecture"
        blocks = "one block" if width <= self.block else f"blocks of {self.block}"
        what = f"{type(norm).__name__}({width}) -> BlockNorm, {blocks}{moved}"
        editor.swap(name, BlockNorm(width, block=self.block, eps=eps), what, effect)

    @staticmethod
    def _choose_eps(norm: nn.Module) -> float:
        """Return the eps of an RMSNorm, or the default: a LayerNorm's eps belongs to a variance, not a mean square."""
        if not is_rms(norm):
            return EPS
        eps, weight = epsilon_of(norm), getattr(norm, "weight", None)
        if eps is not None:
            return eps
        return torch.finfo(weight.dtype if isinstance(weight, Tensor) else torch.float32).eps

    def _move_affine(self, editor: Editor, name: str, norm: nn.Module) -> tuple[str, bool]:
        """Move gain and shift into the linears behind the norm. Return a description, and whether nothing was lost."""
        gain, shift = (_values(norm, attribute) for attribute in ("weight", "bias"))
        has_gain = gain is not None and bool((gain != 1).any())
        has_shift = shift is not None and bool(shift.any())
        if not has_gain and not has_shift:
            return "", True
        sinks = editor.sinks(name, shift=has_shift) if self.fold else "folding is off"
        if isinstance(sinks, str) and has_shift and self.fold:  # a gain alone may pass through dropout
            sinks, has_shift, lost_shift = editor.sinks(name), False, True
        else:
            lost_shift = False
        if isinstance(sinks, str):
            return f"; its gain is dropped ({sinks})", False
        lost_shift |= has_shift and not all(map(editor.has_bias, sinks))
        for sink in sinks if has_shift and not lost_shift else ():
            editor.fold(Fold(f"{name}.bias", sink.site, "shift", sink.repeat))
        for sink in sinks if has_gain else ():
            editor.fold(Fold(f"{name}.weight", sink.site, "gain", sink.repeat))
        into = ", ".join(sink.site for sink in sinks)
        lost = "; its shift is dropped (no bias to move it into)" if lost_shift else ""
        branch = editor.find_branch(name, *(sink.site for sink in sinks))
        lost += f"; the same function only on the path that the example took ({branch})" if branch else ""
        return f"; its affine moved into {into}{lost}", not lost_shift and branch is None


def _values(norm: nn.Module, attribute: str) -> Tensor | None:
    value = getattr(norm, attribute, None)
    return value.detach() if isinstance(value, Tensor) else None
