"""One arm of benchmarks/trained.py: a process that compiles once, captures the step, trains seed by seed, and is timed.

On a GPU a step (forward, backward, AdamW) is one CUDA graph; batches are copied into its inputs, the learning rate is a tensor, and a new seed overwrites weights, optimizer state and remembered
scales in place. Before any seed counts, twenty steps by replay are compared with twenty launched from the host, twice: where they differ by more, or where nothing can be captured, all steps are
launched, and the result says so. The graph that trained is the graph that is timed.
"""

import copy
import itertools
import math
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import zoo
from trained_families import FAMILIES, Batch, open_data

import loka
from loka import mods

CHECKED = 20  # steps that are compared before replays are trusted
REPEATS = 8


@dataclass(frozen=True)
class Bench:
    """What all runs share; None: as the family has it."""

    root: Path
    device: str
    size: str
    batch: int | None
    steps: int | None
    learning_rate: float
    tune_seconds: float | None
    work: Path

    def rows(self, family: str) -> int:
        """Of a batch."""
        return self.batch or FAMILIES[family].batch

    def length(self, family: str) -> int:
        """Of a run, in steps."""
        return self.steps or FAMILIES[family].steps

    def data(self, family: str, name: str) -> Any:
        """What a family is trained on."""
        return open_data(self.root, name, family, self.size, self.device, self.rows(family))


def plan_file(bench: Bench, family: str, data: str, architecture: bool) -> Path:
    return bench.work / f"{family}-{data}{'-mods' if architecture else ''}.json"


def checkpoint_file(plan: Path) -> Path:
    return plan.with_suffix(".pt")


def lower(model: nn.Module, arm: str, plan: Path, example: Any, device: str) -> dict[str, Any]:
    """Turn the original into an arm, in place, by public calls alone."""
    if arm == "bf16":
        return {}
    if arm == "naive":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        able = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.in_features % 16 == 0 == m.out_features % 16]  # fmt: skip
        config = Float8LinearConfig(emulate=device == "cpu")  # its defaults are the tensorwise recipe
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name in able)
        return {"converted": len(able)}
    if arm == "mods":
        done = mods.apply(model, [*mods.CORE, *mods.FREE], example=example)
        return {"mods": sorted({change.mod for change in done.summary.changed})}
    chosen = loka.Plan.load(plan)
    if arm == "layout":
        mods.apply(model, [mods.parse(name) for name in chosen.mods], example=example)
        return {"mods": list(chosen.mods)}
    done = loka.convert(model, chosen, example=example)
    return {"share": done.low_precision_share, "units": len(chosen.units), "mods": list(chosen.mods), "converted": len(done.converted)}  # fmt: skip


class Worker:
    """One arm of one family and data set."""

    def __init__(self, bench: Bench, family: str, data: str, arm: str) -> None:
        torch.set_num_threads(1)
        self.bench, self.family, self.arm, self.device = bench, family, arm, bench.device
        self.data = bench.data(family, data)
        self.plan = plan_file(bench, family, data, arm.endswith("mods"))
        self.model = self.data.model(0)
        self.inputs, self.labels = (tuple(t.clone() for t in part) for part in next(self.data.stream(0)))
        wanted = self.reference()
        self.facts = lower(self.model, arm, self.plan, self.inputs, self.device)
        self.warm_up()
        self.scales = {name: t.clone() for name, t in loka.placing.scale_state(self.model).items()}
        torch.set_float32_matmul_precision("high")
        self.run = torch.compile(self.model, dynamic=False) if self.device == "cuda" else self.model
        began = time.time()
        got = self.lose(self.inputs, self.labels, self.run)[1].detach().float()
        self.model.zero_grad(set_to_none=True)
        off = got - wanted
        self.facts |= {"compile_s": time.time() - began, "output_error": float(off.norm() / wanted.norm())}
        # logits that are nearly zero before any training are allowed any relative error
        if not (self.facts["output_error"] < 0.5 or float(off.square().mean().sqrt()) < 0.05):
            raise ValueError(f"{family} {arm}: outputs differ from float32's by {self.facts['output_error']:.3f} before any training")  # fmt: skip
        del got, wanted, off
        self.make_optimizer()
        self.trained: int | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.facts["steps_are"] = self.capture() if self.device == "cuda" else "launched: no GPU"

    @torch.no_grad()
    def reference(self) -> Tensor:
        """Outputs in float32 of the same architecture."""
        torch.set_float32_matmul_precision("highest")
        model = copy.deepcopy(self.model)
        if self.arm == "mods":
            mods.apply(model, list(mods.CORE), example=self.inputs)
        elif self.arm == "tuned-mods":
            mods.apply(model, [mods.parse(n) for n in loka.Plan.load(self.plan).mods], example=self.inputs)
        return model(*self.inputs).float()

    def lose(self, inputs: Any, labels: Any, run: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device, torch.bfloat16):
            out = run(*inputs)
        return self.data.losses(out, labels).mean(), out

    def warm_up(self) -> None:
        """Two steps that change nothing, so that delayed scales are known before anything is compiled."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        for _ in range(2):
            self.lose(self.inputs, self.labels, self.model)[0].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def make_optimizer(self) -> None:
        """AdamW; tables learn faster than the rest, and do not decay. Rates are tensors on a GPU, for the graph to read."""
        cuda, rate, table = self.device == "cuda", self.bench.learning_rate, self.model.table.weight
        rest = [p for p in self.model.parameters() if p is not table]
        self.rates = (rate, FAMILIES[self.family].table_rate * rate)
        groups = [{"params": rest, "weight_decay": 0.01}, {"params": [table], "weight_decay": 0.0}]
        for group, peak in zip(groups, self.rates, strict=True):
            group["lr"] = torch.tensor(peak, device=self.device) if cuda else peak
        self.optimizer = torch.optim.AdamW(groups, fused=cuda, capturable=cuda)
        self.loss = torch.zeros((), device=self.device)

    def set_rates(self, factor: float) -> None:
        for group, peak in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor

    def step(self) -> None:
        """One step on what lies in the buffers."""
        loss = self.lose(self.inputs, self.labels, self.run)[0]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.copy_(loss.detach())

    def feed(self, batch: Batch) -> None:
        for kept, given in zip((*self.inputs, *self.labels), itertools.chain(*batch), strict=True):
            kept.copy_(given)

    def capture(self) -> str:
        """The step in a CUDA graph, if that does what the step does; says how steps are made."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.facts["peak_gib"] = (
            torch.cuda.max_memory_allocated() / 2**30
        )  # of a launched step: a graph's pool is not counted
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            launched, again, replayed = (self.try_out(way) for way in (self.step, self.step, graph.replay))
        except Exception as error:
            torch.cuda.synchronize()
            return f"launched: {type(error).__name__}: {str(error).splitlines()[0]}"
        noise = abs(again / launched - 1)  # kernels that add in any order: two launched runs differ too
        self.facts |= {"graph_difference": abs(replayed / launched - 1), "launched_difference": noise}
        if not self.facts["graph_difference"] < max(0.01, 5 * noise):
            return f"launched: after {CHECKED} steps the loss is {replayed:.6f} by replay, and {launched:.6f} and {again:.6f} launched"
        self.graph = graph
        return "one CUDA graph"

    def try_out(self, again: Any) -> float:
        """The loss after the first steps of seed 0, at a rate that needs no warm-up."""
        self.begin(0)
        self.set_rates(0.3)
        for batch in itertools.islice(self.data.stream(0), CHECKED):
            self.feed(batch)
            again()
        return float(self.loss)

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """The weights of a seed, an optimizer that has seen nothing, and scales as they were before the first step; all in place, since the graph holds addresses."""
        state = self.data.model(seed).state_dict()
        for name, p in self.model.named_parameters():
            if name not in state or state[name].shape != p.shape:
                raise ValueError(f"{name} {tuple(p.shape)} is no parameter of the original; seeds cannot start alike")
            p.copy_(state[name])
            p.grad = None
        for held in self.optimizer.state.values():
            for value in held.values():
                value.zero_()
        if self.arm.startswith("tuned"):
            loka.placing.refresh(self.model)
            loka.placing.load_scale_state(self.model, self.scales)
        self.model.train()

    def train(self, seed: int, deadline: float, stop: int | None = None) -> dict[str, Any]:
        """All steps of a seed (or the first `stop`), and the test loss."""
        self.begin(seed)
        steps, again = self.bench.length(self.family), self.step if self.graph is None else self.graph.replay
        began, warm = time.time(), min(FAMILIES[self.family].warm_up, max(steps // 5, 1))
        for step, batch in enumerate(itertools.islice(self.data.stream(seed), stop or steps)):
            along = max(step - warm, 0) / max(steps - warm, 1)
            self.set_rates((step + 1) / warm if step < warm else 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * along)))
            self.feed(batch)
            again()
            if step % 20 == 19 and time.time() > deadline:
                raise TimeoutError(f"out of time after {step + 1} of {steps} steps")
        found = {**self.facts, "steps": stop or steps, "train_loss": float(self.loss), "train_s": time.time() - began}
        self.trained = seed
        return found if stop else found | self.score()

    @torch.no_grad()
    def score(self) -> dict[str, Any]:
        """On the test split, the model as it trained, not compiled."""
        self.model.eval()
        with torch.autocast(self.device, torch.bfloat16):
            found: dict[str, Any] = self.data.score(self.model)
        self.model.train()
        return found

    def save(self, seed: int, deadline: float) -> dict[str, Any]:
        """A third of the training, for tune to look at."""
        found = self.train(seed, deadline, stop=max(2, self.bench.length(self.family) // 3))
        torch.save(self.model.state_dict(), checkpoint_file(self.plan))
        return found

    def ready(self) -> None:
        """Whether there is something to time."""
        if self.trained is None:
            raise RuntimeError("no seed was trained in this process: nothing to time")
        if self.graph is None:
            raise RuntimeError(f"steps are {self.facts['steps_are']}: what the host takes would be timed")

    def clock(self) -> list[float]:
        """Milliseconds of the captured step."""
        assert self.graph is not None  # `ready` refused
        return zoo._time(self.graph.replay, 3, REPEATS)


def make_plan(bench: Bench, family: str, data: str, architecture: bool) -> dict[str, Any]:
    """Tune the model that was trained a third; save the plan. Returns what tune found."""
    torch.set_float32_matmul_precision("high")
    source = bench.data(family, data)
    model, batches = source.model(0), source.for_tuning()
    if architecture:
        mods.apply(model, [*mods.CORE, *mods.FREE], example=batches[0][0])
    out = plan_file(bench, family, data, architecture)
    model.load_state_dict(torch.load(checkpoint_file(out)))
    seconds = bench.tune_seconds or FAMILIES[family].tune_seconds
    tuned = loka.tune(model, batches, source.losses, seconds=seconds, autocast=torch.bfloat16, progress=False)
    tuned.plan.save(out)
    print(f"== {family} {data}{' with mods' if architecture else ''}\n{tuned}", flush=True)
    return {"printed": str(tuned), "record": msgspec.to_builtins(tuned.record)}


def serve(pipe: Any, bench: Bench, family: str, data: str, arm: str) -> None:
    """A worker's process: does what it is told, and says how it went; what fails is an answer too."""
    worker: Worker | None = None
    while True:
        word, *given = pipe.recv()
        try:
            if word == "stop":
                return
            if word == "plan":
                answer: Any = make_plan(bench, family, data, *given)
            else:
                worker = worker or Worker(bench, family, data, arm)
                answer = getattr(worker, word)(*given)
        except Exception as error:
            trace = traceback.format_exc().replace(f"{Path(__file__).parents[1]}/", "")  # records name no place
            answer = {"error": f"{type(error).__name__}: {error}"[:1500], "trace": trace[-1500:]}
        pipe.send(answer)
