"""Look: one call of a site on a sampled step, as copies of some of its rows that live until the end of the step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import QTensor
from loka.probe.shown import Shown

MAX_SCORED, MIN_SCORED = 256, 64  # a quarter of the rows of a call is scored, within these bounds


@dataclass
class Own:
    """Rows of a look as the chain multiplied them: x [R, K], the weight [N, K] and its transpose, later dy [R, N]."""

    x: QTensor
    w: QTensor
    w_t: QTensor
    dy: QTensor | None = None


@dataclass
class Look:
    """Rows of one call, until its gradient arrives and the step ends."""

    x: Tensor
    index: Tensor | None  # indices of the copied rows; None for all
    right: Tensor | None  # the second operand of one example, if that is an activation
    count: int  # rows of the call
    examples: int  # examples of the call
    together: int  # consecutive rows of x that belong to one example
    call: int  # number of the model call within this step
    largest: dict[str, Tensor]  # amax over all rows, by role
    weight: Tensor | None = None  # copy, if the look is scored: the optimizer changes the weight before the step ends
    dy: Tensor | None = None
    left: Tensor | None = None  # `loka.formats.left_in_sum` of the gradients of all rows
    own: Own | None = None  # for a link of a chain: the same rows as the chain multiplied them
    calls: int = 1  # calls of this linear within the same model call
    weighs: float = 1.0  # weight of a row relative to rows of those other calls

    def rows_to_score(self) -> Tensor:
        """Return the indices of the rows to score, keeping the rows of an example together."""
        groups = self.x.shape[0] // self.together
        wanted = max(1, min(MAX_SCORED, max(MIN_SCORED, self.count // 4)) // self.together)
        pick = torch.arange(groups * self.together, device=self.x.device).view(groups, self.together)
        return pick[:: max(1, -(-groups // wanted))].reshape(-1)

    def show(self, weight: Tensor, loss: tuple[Tensor, Tensor], before: Mapping[str, Tensor]) -> Shown:
        """Return the rows to score, with everything the score needs."""
        rows = self.rows_to_score()
        return Shown(
            self.x[rows],
            None if self.dy is None else self.dy[rows],
            weight,
            *loss,
            examples=self.examples * self.calls,
            together=self.together,
            per_example=self.count // self.examples,
            largest=self.largest,
            before=before,
            left=self.left,
            weighs=self.weighs,
        )
