"""The interface between an op of the registry and the benchmark. `loka.measure.adapter` lists the implementations.

An adapter says which calls to try, draws their operands, turns a backend into a callable, checks it against the exact
result, and counts the minimal bytes and FLOPs.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from loka.measure.conformance import Conformance
from loka.measure.inputs import Shape
from loka.measure.timing import Rival, Thunk

C = TypeVar("C")  # the description of a call
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Op(Generic[C]):
    """The benchmark's adapter of one op."""

    op: ClassVar[str]
    VARIANTS: ClassVar[tuple[str, ...]]  # the default variants
    OWN: ClassVar[type | None] = None  # its own class of calls, if it adds options of variants to the kernel's class
    OWN_SETS: ClassVar[tuple[str, ...]] = ()  # distributions that the gate draws for this op besides those of every op
    DIMENSIONS: ClassVar[tuple[str, ...]]  # dimensions of a shape, in order: fields of the call, or `name=field`

    def parse(self, shape: Shape, variant: str) -> C:
        """Return the call of a shape and a variant. Raises ValueError for an invalid variant."""
        raise NotImplementedError

    def spell(self, call: C) -> str:
        """Return the variant of a call: the inverse of `parse`."""
        raise NotImplementedError

    def operands(self, call: C, *, seed: int, distribution: str, device: torch.device) -> Any:
        """Draw the inputs of a call."""
        raise NotImplementedError

    def thunk(self, backend: Any, call: C, operands: Any) -> Thunk:
        """Return a function that runs the backend on these operands, in the layout it prefers, ready to be timed."""
        raise NotImplementedError

    def check(self, backend: Any, call: C, operands: Any) -> Conformance:
        """Check the backend against the exact result. An adapter has this, or `exact` and `compare`."""
        return self.compare(backend, call, operands, cache(partial(self.exact, call, operands)))

    def exact(self, call: C, operands: Any) -> Any:
        """Return the exact result of a call, as `compare` takes it."""
        raise NotImplementedError

    def compare(self, backend: Any, call: C, operands: Any, exact: Callable[[], Any]) -> Conformance:
        """Check the backend against an exact result that several checks of equal operands share.

        Args:
            backend, call, operands: as in `check`.
            exact: returns what `self.exact` returns for these values. Called after the backend has run, so that a
                kernel which is still being compiled (`loka.kernels.compiling`) is not waited for in vain.

        Returns:
            The verdict.
        """
        return self.check(backend, call, operands)

    def shows_nan(self, call: C) -> bool:
        """Return whether the exact result of a call says where a NaN among the operands must be seen again."""
        return False

    def adopt(self, call: Any) -> C | None:
        """Return a call that a kernel was given as one of this adapter's; options of variants keep their defaults.

        None if the adapter has no check for this kind of call.
        """
        if self.OWN is None or isinstance(call, self.OWN):
            return cast(C, call)
        if type(call) is not self.OWN.__base__:
            return None
        return cast(C, self.OWN(**{field.name: getattr(call, field.name) for field in fields(self.OWN.__base__)}))

    def baseline(self, call: C, operands: Any) -> Thunk:
        """Return a function that does the same in bf16."""
        raise NotImplementedError

    def check_baseline(self, call: C, operands: Any) -> Conformance:
        """Check the baseline against the exact result of its own operands, since it is timed too."""
        raise NotImplementedError

    def bytes_moved(self, call: C) -> int:
        """Return the minimal memory traffic in bytes: each input read once, each output written once."""
        raise NotImplementedError

    def flops(self, call: C) -> int:
        """Return the FLOPs of the tensor cores; 0 for ops that only move bytes."""
        return 0

    def rivals(self, call: C, sets: Sequence[Any]) -> list[Rival]:
        """Return competitors that are timed together with the backends on the same operand sets."""
        return []

    def calls(self, shapes: Sequence[Shape], variants: Sequence[str]) -> list[C]:
        """Return the calls to try: every shape with every variant, without duplicates."""
        return list(dict.fromkeys(self.parse(shape, variant) for shape in shapes for variant in variants))

    def shape(self, call: C) -> dict[str, int]:
        """Return the call's dimensions by name."""
        return {name: getattr(call, field or name) for name, _, field in (d.partition("=") for d in self.DIMENSIONS)}

    def encode(self, call: C) -> dict[str, Any]:
        """Encode a call as JSON values for a child process."""
        return {**self.shape(call), "variant": self.spell(call)}

    def decode(self, fields: dict[str, Any]) -> C:
        """Decode a call: the inverse of `encode`."""
        sizes = [*(fields.get(d.partition("=")[0], 0) for d in self.DIMENSIONS), 0]
        return self.parse((sizes[0], sizes[1], sizes[2]), fields["variant"])


def read_variant(text: str, head: str, flags: Sequence[str], spelled: str) -> tuple[re.Match[str], set[str], torch.dtype]:  # fmt: skip
    """Parse `HEAD|option|option|dtype`. `spelled` is the expected form, for the error message.

    Returns the match of the head, the flags that are set, and the dtype (default bfloat16).
    """
    first, *options = text.split("|")
    match, kinds = re.fullmatch(head, first), [option for option in options if option in DTYPES]
    if match is None or set(options) - {*flags, *kinds} or len(kinds) > 1:
        raise ValueError(f"variant {text!r} is not {spelled}")
    return match, set(options) - set(kinds), DTYPES[kinds[0]] if kinds else torch.bfloat16


def spell_variant(head: str, call: Any, flags: Sequence[str]) -> str:
    """Spell a variant for `read_variant`: the head, the flags that are set on the call, and its dtype."""
    set_ = [flag for flag in flags if getattr(call, flag)]
    return "|".join([head, *set_, str(call.dtype).removeprefix("torch.")])
