"""Tensors are found wherever an example, or an attribute, holds them."""

from types import SimpleNamespace

import torch

from loka.units.example import tensors_in


def nested(value: object, levels: int) -> object:
    for _ in range(levels):
        value = SimpleNamespace(inner=value)
    return value


def test_what_is_met_far_down_first_is_found_where_it_is_near() -> None:
    """The chain of a linear is an attribute of the linear, and reached from the model as well, by a longer way."""
    tensor = torch.zeros(1)
    held = SimpleNamespace(held=[tensor])
    assert not list(tensors_in(nested(held, 5)))  # an object may lead to the whole program: there is an end
    assert [found is tensor for found in tensors_in([nested(held, 4), held])] == [True]


def test_what_refers_to_itself_ends() -> None:
    loop: list[object] = [torch.zeros(1)]
    loop.append(loop)
    assert len(list(tensors_in(loop))) == 1
