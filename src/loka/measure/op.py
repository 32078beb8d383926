"""What the benchmark must know about an op, and nothing more: one view per op of the registry (`loka.measure.adapter`).

A view says which calls to try, makes their operands, turns a backend into something to call, judges it against the law, and counts the bytes and FLOPs nobody can avoid.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch

from loka.measure.conformance import Conformance
from loka.measure.inputs import Shape
from loka.measure.timing import Rival, Thunk

C = TypeVar("C")  # what describes a call
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Op(Generic[C]):
    """One op, seen by the benchmark."""

    op: ClassVar[str]
    VARIANTS: ClassVar[tuple[str, ...]]  # tried where none are named
    DIMENSIONS: ClassVar[tuple[str, ...]]  # those of a shape, in its order: the call's fields, or `name=field`

    def parse(self, shape: Shape, variant: str) -> C:
        """The call of a shape under a variant; ValueError for what is no variant."""
        raise NotImplementedError

    def spell(self, call: C) -> str:
        """The variant of a call: the inverse of `parse`."""
        raise NotImplementedError

    def operands(self, call: C, *, seed: int, distribution: str, device: torch.device) -> Any:
        """Inputs of the call."""
        raise NotImplementedError

    def thunk(self, backend: Any, call: C, operands: Any) -> Thunk:
        """The backend on these operands, in the layout it prefers, ready to be timed."""
        raise NotImplementedError

    def check(self, backend: Any, call: C, operands: Any) -> Conformance:
        """The backend against the law."""
        raise NotImplementedError

    def baseline(self, call: C, operands: Any) -> Thunk:
        """The same job in bf16."""
        raise NotImplementedError

    def check_baseline(self, call: C, operands: Any) -> Conformance:
        """The baseline against the law of its own operands: it is timed too."""
        raise NotImplementedError

    def bytes_moved(self, call: C) -> int:
        """The fewest bytes through memory: each input read once, each output written once."""
        raise NotImplementedError

    def flops(self, call: C) -> int:
        """Operations of the matrix units; 0 for ops that only move bytes."""
        return 0

    def rivals(self, call: C, sets: Sequence[Any]) -> list[Rival]:
        """What else is worth a column: timed together with the backends on the same operand sets."""
        return []

    def calls(self, shapes: Sequence[Shape], variants: Sequence[str]) -> list[C]:
        """The calls to try: every shape under every variant, each different call once."""
        return list(dict.fromkeys(self.parse(shape, variant) for shape in shapes for variant in variants))

    def shape(self, call: C) -> dict[str, int]:
        """The call's dimensions, by name."""
        return {name: getattr(call, field or name) for name, _, field in (d.partition("=") for d in self.DIMENSIONS)}

    def encode(self, call: C) -> dict[str, Any]:
        """A call as JSON, for a child process."""
        return {**self.shape(call), "variant": self.spell(call)}

    def decode(self, fields: dict[str, Any]) -> C:
        """The inverse of `encode`."""
        sizes = [*(fields.get(d.partition("=")[0], 0) for d in self.DIMENSIONS), 0]
        return self.parse((sizes[0], sizes[1], sizes[2]), fields["variant"])


def read_variant(text: str, head: str, flags: Sequence[str], spelled: str) -> tuple[re.Match[str], set[str], torch.dtype]:  # fmt: skip
    """Take `HEAD|option|option|dtype` apart: the match of the head, the flags that are set, and the type, bfloat16 where none is named. `spelled` says in a refusal how a variant is written."""
    first, *options = text.split("|")
    match, kinds = re.fullmatch(head, first), [option for option in options if option in DTYPES]
    if match is None or set(options) - {*flags, *kinds} or len(kinds) > 1:
        raise ValueError(f"variant {text!r} is not {spelled}")
    return match, set(options) - set(kinds), DTYPES[kinds[0]] if kinds else torch.bfloat16


def spell_variant(head: str, call: Any, flags: Sequence[str]) -> str:
    """The counterpart of `read_variant`: the flags that are attributes of the call and set, and its type."""
    set_ = [flag for flag in flags if getattr(call, flag)]
    return "|".join([head, *set_, str(call.dtype).removeprefix("torch.")])
