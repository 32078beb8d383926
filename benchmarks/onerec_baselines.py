"""What the engine is compared with, on the same model: the plain model eagerly, in a CUDA graph, and compiled as a user would.

    Plain      models.beam.search, eager, or captured whole in one CUDA graph
    Compiled   the same model: torch.compile with static shapes on its blocks, its context, its heads and on the scoring of beams,
               permutation + torch's grouped GEMM (nn.GroupedLinear on a GPU), torch.topk, and one CUDA graph around all of it

Blocks are compiled one by one rather than the whole generation at once: the compiled block is shared by all blocks of its kind, which takes a minute
instead of many, and what is lost is only the fusion of one addition across the border of two blocks.
"""

from typing import Any

import torch
from torch import Tensor

from loka.data.batch import Jagged
from loka.inference import Request
from loka.models.beam import search
from loka.models.onerec import Context, OneRec, Past, reorder


def join(requests: list[Request], device: torch.device) -> Jagged:
    offsets = torch.tensor([0, *(len(r.history) for r in requests)]).cumsum(0)
    return Jagged(torch.cat([r.history for r in requests]).to(device), offsets.to(device))


class Graphed:
    """A function of no arguments, captured in a CUDA graph where there is a GPU; called plainly elsewhere."""

    def __init__(self, function: Any, device: torch.device, *, graph: bool = True) -> None:
        self.function, self.graph, self.result = function, None, None
        self.history: Jagged | None = None
        if device.type == "cuda" and graph:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function()
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = function()

    def __call__(self) -> Any:
        if self.graph is None:
            return self.function()
        self.graph.replay()
        return self.result


def make_plain(model: OneRec, requests: list[Request], beams: int, *, graph: bool) -> Graphed:
    """models.beam.search of one batch."""
    device = model.begin.weight.device
    history = join(requests, device)

    @torch.no_grad()
    def run() -> Any:
        return search(model, model.encode(history), beams=beams)

    return Graphed(run, device, graph=graph)


def _score(scores: Tensor, logits: Tensor) -> Tensor:
    return (scores[..., None] + logits.log_softmax(-1)).flatten(1)


class _Pieces:
    """The compiled functions of one batch size; static shapes."""

    def __init__(self, compiler: str) -> None:
        self.options: dict[str, Any] = {"dynamic": False, "backend": compiler}
        self.block = torch.compile(self._block, **self.options)
        self.head = torch.compile(lambda head, h: head(h), **self.options)
        self.score = torch.compile(_score, **self.options)
        self.reorder = torch.compile(reorder, **self.options)

    @staticmethod
    def _block(block: Any, h: Tensor, context: Context, past: Past) -> tuple[Tensor, Past]:
        out: tuple[Tensor, Past] = block.step(h, context, past)
        return out


def make_compiled(model: OneRec, requests: list[Request], beams: int, *, compiler: str = "inductor") -> Graphed:
    """The plain model's own functions, compiled, in one graph."""
    device = model.begin.weight.device
    history = join(requests, device)
    torch._dynamo.config.recompile_limit = 64  # a kind of block, a step and a batch size are one compilation each
    pieces = _Pieces(compiler)
    encode = torch.compile(model.encode, dynamic=False, backend=compiler)

    @torch.no_grad()
    def run() -> tuple[Tensor, Tensor]:
        context = encode(history)
        batch = context.mask.shape[0]
        scores = torch.zeros(batch, 1, device=device)
        spelled = torch.empty(batch, 1, 0, dtype=torch.int64, device=device)
        past: list[Past] = [None] * len(model.blocks)
        codes: Tensor | None = None
        for level in range(model.config.levels):
            h = model.begin(batch) if codes is None else model.codes.take(model.codes.names[level - 1], codes)
            for place, block in enumerate(model.blocks):
                h, past[place] = pieces.block(block, h, context, past[place])
            logits = pieces.head(model.heads[level], h)
            total = pieces.score(scores, logits)
            width = logits.shape[2]
            scores, best = total.topk(min(beams, total.shape[1]), dim=1)
            parents, codes = best // width, best % width
            if level + 1 < model.config.levels:
                past = pieces.reorder(past, parents)
            spelled = torch.cat([spelled.gather(1, parents[..., None].expand(-1, -1, level)), codes[..., None]], 2)
        return spelled, scores

    made = Graphed(run, device)
    made.history = history  # static: other requests of the same lengths can be copied into it
    return made
