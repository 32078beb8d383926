"""find_branch: conditions that only the constructor decides do not count, everything that may go another way does."""

import pytest
import torch
from torch import Tensor, nn

from loka.mods.branching import find_branch


class Shortcut(nn.Module):
    """With a projection or without, as the constructor decides."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shortcut = nn.Linear(4, 4) if wide else None

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.shortcut is None else self.shortcut(x)
        if self.shortcut is not None:
            kept = kept * 2
        return self.linear(x) + kept


class Lazy(Shortcut):
    """Makes the projection in the first call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.shortcut is None:
            self.shortcut = nn.Linear(4, 4)
        return self.shortcut(x)


class Switched(Shortcut):
    """Another method takes the projection away."""

    def simplify(self) -> None:
        self.shortcut = None


class SwitchedByName(Shortcut):
    def drop(self, name: str) -> None:
        setattr(self, name, None)


class Cached(Shortcut):
    """What is kept between calls is no part of the architecture."""

    def __init__(self) -> None:
        super().__init__(True)
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.last is None else self.linear(x) + self.last


class Training(Shortcut):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.training else x


@pytest.mark.parametrize("wide", [True, False])
def test_whether_a_module_has_a_child_is_settled(wide: bool) -> None:
    assert find_branch(Shortcut(wide)) is None


@pytest.mark.parametrize(
    "module", [Lazy(False), Lazy(True), Switched(True), SwitchedByName(True), Cached(), Training(True)], ids=lambda m: type(m).__name__
)  # fmt: skip
def test_what_may_change_later_is_a_branch(module: nn.Module) -> None:
    assert "branches" in (find_branch(module) or "")
