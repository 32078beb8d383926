"""Spec: everything that determines how a tensor is quantized, as one value with one canonical spelling.

    e4m3:1x128                     format : block
    e4m3:row                       one scale per row (per token, or per output channel of a weight)
    e5m2:tensor:delayed            the scale comes from earlier steps
    e4m3:128x128:pow2              float32 scales rounded up to powers of two
    e4m3:1x32:e8m0                 MXFP8          e2m1:1x32:e8m0     MXFP4
    e2m1:1x16:e4m3                 NVFP4: E4M3 block scales under one float32 scale for the tensor
    e4m3:tensor:static:stochastic

The spelling is used in the command line, JSON, HTML, test ids and `extra_repr`. Defaults (float32 scale, dynamic,
nearest) are not printed. Optional parts may be given in any order and are always printed in the same one.

Granularity is a block shape over the last two dimensions; `*` is the whole extent. `tensor` spans leading dimensions
too, every other block is repeated over them.
"""

import re
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from loka.formats.format import FORMATS, Format, Rounding

ScaleType = Literal["f32", "pow2", "e8m0", "e4m3"]
ScaleMode = Literal["dynamic", "static", "delayed"]

WHOLE = -1

_BLOCK = re.compile(r"([0-9]{1,9}|\*)x([0-9]{1,9}|\*)")


@dataclass(frozen=True)
class Block:
    """The shape of a group of elements that share a scale, over the last two dimensions.

    Args:
        rows: of the group; WHOLE (-1) for all.
        cols: of the group; WHOLE (-1) for all.

    Example:
        >>> Block.parse("1x128")
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        for extent in (self.rows, self.cols):
            if type(extent) is not int or (extent != WHOLE and extent < 1):
                raise ValueError(f"a block extent is a positive integer or * (whole), got {self.rows} x {self.cols}")

    @property
    def transposed(self) -> "Block":
        """Return the block that covers the same elements of the transposed tensor."""
        return Block(self.cols, self.rows)

    @classmethod
    def parse(cls, text: str) -> "Block":
        """Parse `tensor`, `row`, `col`, `1x128`, `*x128`."""
        if text in _NAMED_BLOCKS:
            return _NAMED_BLOCKS[text]
        match = _BLOCK.fullmatch(text)
        if match is None:
            raise ValueError(f"block {text!r} is not tensor, row, col or ROWSxCOLS (e.g. 1x128, 128x128, *x1)")
        rows, cols = (WHOLE if part == "*" else int(part) for part in match.groups())
        return cls(rows, cols)

    def __str__(self) -> str:
        for name, block in _NAMED_BLOCKS.items():
            if block == self:
                return name
        return "x".join("*" if extent == WHOLE else str(extent) for extent in (self.rows, self.cols))


_NAMED_BLOCKS = {"tensor": Block(WHOLE, WHOLE), "row": Block(1, WHOLE), "col": Block(WHOLE, 1)}
TENSOR, ROW, COL = _NAMED_BLOCKS.values()


@dataclass(frozen=True)
class Spec:
    """How a tensor is quantized. `Spec.parse(str(spec)) == spec`.

    Args:
        format: of the elements.
        block: elements that share a scale.
        scale: type of the scales.
        mode: scales are computed from the tensor (dynamic), from earlier steps (delayed), or fixed (static).
        rounding: nearest or stochastic.

    Example:
        >>> Spec.parse("e4m3:1x128")
    """

    format: Format
    block: Block = field(default=TENSOR)
    scale: ScaleType = "f32"
    mode: ScaleMode = "dynamic"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format) or not isinstance(self.block, Block):
            raise ValueError(
                f"Spec takes a Format and a Block, got {self.format!r} and {self.block!r}; hint: Spec.parse('e4m3:1x128')"
            )
        for name, kind in (("scale", ScaleType), ("mode", ScaleMode), ("rounding", Rounding)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"Spec.{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if self.scale == "e4m3" and self.block == TENSOR:
            raise ValueError(
                "scale type e4m3 is the block half of a two-level scale; hint: use a block, e.g. e2m1:1x16:e4m3"
            )
        if self.scale == "e4m3" and self.mode != "dynamic":
            raise ValueError(f"scale type e4m3 supports only dynamic scales, got {self.mode}")

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Parse a spelling; optional parts may be in any order."""
        name, *parts = text.strip().split(":")
        if name not in FORMATS or not parts:
            raise ValueError(
                f"spec {text!r} is not FORMAT:BLOCK[:...] with FORMAT in {', '.join(FORMATS)}; e.g. e4m3:1x128"
            )
        options: dict[str, str] = {}
        for part in parts[1:]:
            key = _OPTIONS.get(part)
            if key is None:
                raise ValueError(f"spec {text!r}: {part!r} is not one of {', '.join(_OPTIONS)}")
            if key in options:
                raise ValueError(f"spec {text!r}: {options[key]!r} and {part!r} both set the {key}")
            options[key] = part
        return cls(
            FORMATS[name],
            Block.parse(parts[0]),
            cast(ScaleType, options.get("scale", "f32")),
            cast(ScaleMode, options.get("mode", "dynamic")),
            cast(Rounding, options.get("rounding", "nearest")),
        )

    @property
    def transposed(self) -> "Spec":
        """Return the spec of the transposed tensor, in which the same elements share a scale."""
        return Spec(self.format, self.block.transposed, self.scale, self.mode, self.rounding)

    def __str__(self) -> str:
        parts = [self.format.name, str(self.block)]
        if self.scale != "f32":
            parts.append(self.scale)
        if self.mode != "dynamic":
            parts.append(self.mode)
        if self.rounding != "nearest":
            parts.append(self.rounding)
        return ":".join(parts)


_OPTIONS: dict[str, str] = {
    **dict.fromkeys(get_args(ScaleType), "scale"),
    **dict.fromkeys(get_args(ScaleMode), "mode"),
    **dict.fromkeys(get_args(Rounding), "rounding"),
}
