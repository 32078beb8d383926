"""The generation engine: static memory, one prepared shape per bucket, the same code for 16-bit and FP8.

    engine = Engine(model, EngineConfig(beams=512), valid=index.trie)
    for found in engine.generate([Request(codes_of_history), ...]):
        found.items, found.scores

The model may be plain, quantized (`loka.quantize`) or converted (`loka.convert`); the engine keeps its precisions. On a
GPU every bucket is captured as one CUDA graph on first use (or ahead, by `warm`), after a warm-up that compiles and
chooses backends. The kernels that the first bucket's run calls (of packed weights, attention, routing and search) are
judged at their shapes (`loka.placing.judging`), in later buckets those that differ in more than their rows. `auto` takes
another backend for a wrong one, with a warning (as there is of what cannot be judged); without another one, or for a
configured backend, an error is raised. (Where backends are chosen by measuring, each is judged at its number of rows
before it is timed.) All graphs share one memory pool and one set of caches, because only one batch runs at a time. On a
CPU the same functions run eagerly.

Scheduling is in loka.serving, the translation between items and codes in loka.inference.recommender.
"""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from loka.inference.config import Bucket, EngineConfig, choose_bucket
from loka.inference.constraint import make_constraints
from loka.inference.context import PackedContext, Pair
from loka.inference.decoder import Decoder, Found, Inputs, beam_widths
from loka.inference.glue import Glue
from loka.inference.memory import check_memory, explain_exhaustion
from loka.inference.request import Recommendation, Request, check_request, pad_requests, split_found
from loka.inference.tuning import Tuning
from loka.inference.weights import PackedModel, Placement
from loka.kernels import registry
from loka.lowp.chain import chains_of
from loka.measure.capturing import capturing
from loka.measure.kernel_calls import KernelCall, find_calls
from loka.models.onerec import OneRec
from loka.placing.judging import Judge
from loka.records.prose import name_some
from loka.semantic_ids import Trie

# What packed weights are multiplied by, and what makes their operands.
JUDGED = ("quantize", "norm_quantize", "scaled_mm", "grouped_mm")
# Judged unless they are torch's own, which the plain model runs as well. A CUDA graph can capture their references.
SEARCH = ("beam_attention", "route", "topk")


def _is_judged(one: KernelCall) -> bool:
    return one.op in JUDGED or (one.op in SEARCH and one.backend != "torch")


def _has_other(one: KernelCall, device: torch.device) -> bool:
    """Return whether `auto` has another kernel once this one is avoided; False where it was avoided, and ran by name."""
    if registry.is_avoided(one.op, one.backend, one.call):
        return False
    return getattr(one.call, "swiglu", False) or any(  # experts run two kernels where no fused one is left
        name != one.backend
        and (name != "reference" or one.op in SEARCH)
        and (one.op, name) not in registry.BY_NAME
        and not registry.is_avoided(one.op, name, one.call)
        and bool(registry.backend(one.op, name).supports(one.call, device))
        for name in registry.BACKENDS[one.op]
    )


def _name_other(one: KernelCall, calls: Sequence[KernelCall]) -> str:
    """Return what runs in place of a kernel: among these calls, the backend of its own, else those it was fused from."""
    return next((other.backend for other in calls if (other.op, other.call) == (one.op, one.call)), "two kernels")


@dataclass
class Prepared:
    """A prepared bucket: static inputs and caches, whether its kernels were judged, and on a GPU the graph with the
    outputs it writes."""

    inputs: Inputs
    caches: list[Pair]
    decoder: Decoder
    graph: Any = None
    found: Found | None = None
    judged: bool = False


class Engine:
    """Generate recommendations for batches of requests.

    Args:
        model: the model, plain, quantized or converted.
        config: configuration of the engine.
        valid: trie of the valid ids; None: any code may follow any other.
        device: device to run on; default: the model's.

    Example:
        >>> engine = Engine(model, EngineConfig(beams=50), valid=index.trie)            # doctest: +SKIP
        >>> engine.generate([Request(codes)])[0].items                                  # doctest: +SKIP
    """

    def __init__(
        self,
        model: OneRec,
        config: EngineConfig | None = None,
        *,
        valid: Trie | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(model, OneRec):
            raise ValueError(f"the engine runs OneRec models, got {type(model).__name__}")
        if chained := [name for name, _ in chains_of(model)]:
            raise ValueError(
                f"the engine runs linears and experts, but {name_some(chained)} run as chains; hint: "
                "revert(model), then quantize by a recipe"
            )
        self.config = config or EngineConfig()
        self.model_config = model.config
        self.device = torch.device(device or model.begin.weight.device)
        self._check(valid)
        self.buckets = self.config.buckets(model.config.context)
        self.needed = check_memory(model, self.config, self.buckets, self.device)
        backends = dict(self.config.backends)
        placement = Placement(self.device, self.config.torch_dtype, backends, self.config.fast_accum)
        gpu = self.device.type == "cuda"
        self.graphs = gpu if self.config.graphs is None else self.config.graphs
        fuse = gpu if self.config.fuse is None else self.config.fuse
        with explain_exhaustion(self.needed, self.device), torch.no_grad():
            self.packed = PackedModel.of(model, placement, fold=self.config.fold_shared)
            self.context = PackedContext.of(model, placement, self.packed.table, cache=self.config.context_cache)
            self.glue = Glue(fuse=fuse, backends=backends)
            self.trie = None if valid is None else valid.to(self.device)
            search = backends.get("topk", "auto")
            only = self.config.normalize == "valid"
            levels = model.config.levels
            self.constraints = make_constraints(self.trie, levels, search, self.glue.lse, valid_only=only)
            # Measured choices may differ between processes, so batch invariance uses the fixed order.
            tune = gpu and not self.config.batch_invariant if self.config.tune is None else self.config.tune
            self.tuning = Tuning(self.packed, self.config.torch_dtype, fixed=set(backends), measure=tune)
            self._storage = self._allocate()
        self.judge = Judge(self.device)  # its notes, of what was not judged or is replaced, are warnings too
        self._judged: set[KernelCall] = set()  # kinds of calls that were judged
        self._replaced: set[KernelCall] = set()  # kinds of calls that are noted to run on another kernel
        self._told = 0  # notes that were given as warnings
        self._prepared: dict[Bucket, Prepared] = {}
        self._pool: Any = None
        self.captures = 0  # buckets prepared so far; a server checks that it does not grow once warm

    def _check(self, valid: Trie | None) -> None:
        if valid is not None and valid.codebook_sizes != self.model_config.codebooks:
            raise ValueError(
                f"the valid ids have codebooks {valid.codebook_sizes}, the model {self.model_config.codebooks}"
            )
        if self.config.graphs and self.device.type != "cuda":
            raise ValueError(f"CUDA graphs were requested, but the engine is on {self.device}")

    def _allocate(self) -> list[Tensor]:
        c = self.model_config
        width = max(beam_widths(c.codebooks, self.config.beams)[:-1])
        size = 2 * (c.levels - 1) * max(r for r, _ in self.buckets) * width * c.d
        return [torch.empty(size, dtype=self.config.torch_dtype, device=self.device) for _ in range(c.layers)]

    def prepare(self, bucket: Bucket) -> Prepared:
        """Return the bucket, ready to run; prepared on first use."""
        if bucket not in self._prepared:
            if bucket not in self.buckets:
                raise ValueError(f"{bucket} is not one of the buckets {self.buckets}")
            with explain_exhaustion(self.needed, self.device), torch.no_grad():
                self._prepared[bucket] = self._make(bucket)
        return self._prepared[bucket]

    def warm(self) -> None:
        """Prepare and run every bucket, largest first, so that no request waits for it and memory is allocated now."""
        for bucket in sorted(self.buckets, reverse=True):
            self.run(bucket)

    def _make(self, bucket: Bucket) -> Prepared:
        rows = bucket[0]
        decoder = self._make_decoder(rows)
        padded = pad_requests([], self.model_config, bucket)
        static = None if padded.static is None else padded.static.to(self.device)
        inputs = Inputs(padded.codes.to(self.device), padded.lengths.to(self.device), static)
        made = Prepared(inputs, decoder.make_caches(rows, self._storage), decoder)
        if self.graphs:
            self._capture(made)
        self.captures += 1
        return made

    def _make_decoder(self, rows: int) -> Decoder:
        widest = max(beam_widths(self.model_config.codebooks, self.config.beams)[:-1])
        return Decoder(
            self.model_config,
            self.tuning.tuned(rows),
            self.tuning.tuned(rows * widest),
            self.context,
            self.constraints,
            self.glue,
            beams=self.config.beams,
        )

    def _generate(self, made: Prepared) -> Found:
        """Run a bucket eagerly. The first time, judge the kernels that ran; where one is wrong, run others, or raise.

        A server prepares dozens of buckets that differ in rows alone, and judging all would take minutes.
        """
        if made.judged:
            return made.decoder.generate(made.inputs, made.caches)
        found: list[Found] = []
        while True:
            calls = find_calls(lambda: found.append(made.decoder.generate(made.inputs, made.caches)))
            new = [one for one in calls if _is_judged(one) and one.kind not in self._judged]
            wrong = self.judge.find_wrong(new)
            self._warn()
            if not wrong:
                break
            self._avoid(wrong)
            self.tuning.forget()  # what it chose by the number of rows may be what is wrong
            made.decoder = self._make_decoder(made.inputs.codes.shape[0])
        self._judged |= {one.kind for one in new}
        made.judged = True
        self._note_replaced(calls)
        return found[-1]

    def _note_replaced(self, calls: Sequence[KernelCall]) -> None:
        """Note the kernels that would run if they were not avoided, whichever engine of this process has judged them."""
        fixed = dict(self.config.backends)
        fused = [KernelCall("grouped_mm", "", call) for call in self.tuning.fused_calls()]
        for other in (*calls, *fused):
            for name in () if other.op in fixed else registry.BACKENDS[other.op]:
                one, why = replace(other, backend=name), registry.is_avoided(other.op, name, other.call)
                if why and one.kind not in self._replaced:
                    self._replaced.add(one.kind)
                    self.judge.notes.append(f"{one.op} runs on {_name_other(one, calls)}, since {one} {why}")
        self._warn()

    def _warn(self) -> None:
        """Warn of what was noted since the last time. Python would show what an earlier engine has said only once."""
        for note in self.judge.notes[self._told :]:
            here = inspect.currentframe()
            line = 0 if here is None else here.f_lineno
            warnings.warn_explicit(note, UserWarning, __file__, line, module=__name__, registry=None)
        self._told = len(self.judge.notes)

    def _avoid(self, wrong: dict[KernelCall, str]) -> None:
        """Let `auto` no longer pick these kernels. Raise if that leaves one without another."""
        fixed = dict(self.config.backends)
        if any(one.op in fixed or not _has_other(one, self.device) for one in wrong):
            told = "\n  ".join(f"{call}: {why}" for call, why in wrong.items())
            hint = f"EngineConfig(backends=(({next(iter(wrong)).op!r}, 'reference'),))"
            raise ValueError(
                f"the engine runs kernels that fail the conformance gate:\n  {told}\nhint: name another backend, as in {hint}"
            )
        for one, why in wrong.items():
            registry.avoid(one.op, one.backend, one.call, f"fails the conformance gate: {why}")

    def _capture(self, made: Prepared) -> None:
        """Warm up on a side stream, as CUDA graph capture requires, then capture."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._generate(made)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        made.graph = torch.cuda.CUDAGraph()
        with capturing(made.graph, pool=self._pool):
            made.found = made.decoder.generate(made.inputs, made.caches)

    @torch.no_grad()
    def run(self, bucket: Bucket, padded: Inputs | None = None) -> Found:
        """Run one batch in its bucket; without inputs, the last ones again. The next run overwrites the result."""
        made = self.prepare(bucket)
        if padded is not None:
            made.inputs.codes.copy_(padded.codes, non_blocking=True)
            made.inputs.lengths.copy_(padded.lengths, non_blocking=True)
            if made.inputs.static is not None and padded.static is not None:
                made.inputs.static.copy_(padded.static, non_blocking=True)
        if made.graph is None:
            return self._generate(made)
        made.graph.replay()
        assert made.found is not None  # set by _capture
        return made.found

    def generate(self, requests: list[Request]) -> list[Recommendation]:
        """Return recommendations in the order of the requests, in several batches if they exceed the largest bucket."""
        for place, request in enumerate(requests):
            check_request(request, self.model_config, place)
        largest = max(r for r, _ in self.buckets)
        out: list[Recommendation] = []
        for start in range(0, len(requests), largest):
            part = requests[start : start + largest]
            out += self.generate_in(self.bucket_for(part), part)
        return out

    def bucket_for(self, requests: list[Request]) -> Bucket:
        """Return the bucket that a batch of these requests runs in."""
        return choose_bucket(self.buckets, len(requests), max(r.history.shape[0] for r in requests))

    def generate_in(self, bucket: Bucket, requests: list[Request]) -> list[Recommendation]:
        """Run one batch of checked requests in a bucket of the caller's choice."""
        found = self.run(bucket, pad_requests(requests, self.model_config, bucket))
        rows = len(requests)
        items = None
        if found.nodes is not None and self.trie is not None:
            items = self.trie.items(found.nodes[:rows]).cpu()
        return split_found(found.codes[:rows].cpu(), found.scores[:rows].cpu(), items, requests, bucket[1])
