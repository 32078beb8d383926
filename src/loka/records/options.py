"""Check the types of options that a person gave by name against the fields of a dataclass."""

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec


def check_options(kind: type[Any], given: Mapping[str, Any], owner: str) -> None:
    """Raise ValueError for the first option whose type is not that of its field.

    A whole number may stand for a float and a list for a tuple; nothing else is converted.

    Args:
        kind: a dataclass.
        given: values of some of its fields.
        owner: what has these options, for the message.

    Example:
        >>> check_options(Options, {"rows": 1000}, "synthetic")  # doctest: +SKIP
    """
    types = get_type_hints(kind)
    for name, value in given.items():
        try:
            if isinstance(value, dict):
                raise msgspec.ValidationError(f"Expected `{types[name].__name__}`, got `dict`")
            msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            reason = str(error).replace("Expected `array`", "Expected a list")
            raise ValueError(f"option {name} of {owner} is {value!r}: {reason[0].lower()}{reason[1:]}") from None
