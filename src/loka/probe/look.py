"""One call of a site on a sampled step: copies of some of its rows, until the step is over."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import QTensor
from loka.probe.shown import Shown

MAX_SCORED, MIN_SCORED = 256, 64  # rows of a look that are scored: a quarter of the call's, within these


@dataclass
class Own:
    """The rows of a look as a chain multiplied them: x [R, K], the weight [N, K] and transposed, dy [R, N] once it came."""

    x: QTensor
    w: QTensor
    w_t: QTensor
    dy: QTensor | None = None


@dataclass
class Look:
    """Rows of one call, waiting for its gradient and for the end of the step."""

    x: Tensor
    index: Tensor | None  # which rows of how many; None: all
    right: Tensor | None  # the second operand of one example, where that is an activation
    count: int  # rows of the call
    examples: int
    together: int  # rows of one example that lie next to each other in x
    call: int  # of the model, in this step
    largest: dict[str, Tensor]  # of all rows, by role
    # as it was in this call, where it is scored: the optimizer changes it before the step is over
    weight: Tensor | None = None
    dy: Tensor | None = None
    left: Tensor | None = None  # of the gradients of all rows, in their sum (`loka.formats.left_in_sum`)
    own: Own | None = None  # of a link of a chain: the same rows as the chain itself multiplied them
    calls: int = 1  # of this linear in the same call of the model
    weighs: float = 1.0  # what a row counts beside those of the other calls

    def rows_to_score(self) -> Tensor:
        """Which of the rows, whole groups of an example's."""
        groups = self.x.shape[0] // self.together
        wanted = max(1, min(MAX_SCORED, max(MIN_SCORED, self.count // 4)) // self.together)
        pick = torch.arange(groups * self.together, device=self.x.device).view(groups, self.together)
        return pick[:: max(1, -(-groups // wanted))].reshape(-1)

    def show(self, weight: Tensor, loss: tuple[Tensor, Tensor], before: Mapping[str, Tensor]) -> Shown:
        """Some of the rows for the score."""
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
