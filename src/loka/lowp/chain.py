"""A chain of linears in FP8 from layer to layer, placed in a model that nobody rewrote.

    [linear -> norm -> activation]*  (-> last linear)            one autograd node; what it computes is in `loka.lowp.chain_function`

The modules of a chain stay where they are and what they are to everybody else: the same objects, parameters, names and state_dict. They change their class (`loka.lowp.chain_modules`), as
`loka.lowp.linear` does: the first linear runs the whole chain, every later module hands on what it is given.

So a chain may lie in an nn.Sequential, in an MLP of one's own, or across attributes that a forward calls one after another: wherever one module's output is read by the next one alone, which
is what `loka.units` looks for. One node and not one per layer, because FP8 tensors cannot travel along autograd's edges: a gradient has its tensor's type.

`Chain` is a plain object beside the modules, not a module: nothing of it enters a state_dict. It holds the links, the scales that are remembered between steps, the frozen weights of a serving
model and the counters that Guard reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.formats import QTensor, scale_from_amax
from loka.kernels.activation import activate
from loka.kernels.dropout import Dropout, check_p, factor_of, keep_mask
from loka.kernels.fused_linear import NORM_BLOCK, NORMALIZED_SCALE
from loka.kernels.quantize import quantize
from loka.lowp.chain_function import (
    STATIC_SPEC,
    TENSOR_SPEC,
    ChainFunction,
    ChainPrecision,
    ChainTensors,
    Layout,
    Link,
    quantize_input,
    run_link,
)
from loka.lowp.chain_modules import (  # fmt: skip
    CHAIN,
    SEES_CHAINS,
    Head,
    Passed,
    add_call,
    chain_of,
    chains_of,
    drop_call,
    is_watched,
    reclass,
)
from loka.lowp.folding import fold, refuse_training, statistics
from loka.lowp.health import FORWARD, record, row_error, sampled_rows, turn_of
from loka.lowp.passing import draws_dropout
from loka.lowp.scaling import AmaxState, Scaling, find_amax
from loka.lowp.step import follow, unfollow
from loka.lowp.witness import Witness, warn_stale
from loka.nn.norm import BlockNorm

__all__ = ["SEES_CHAINS", "TAP", "Chain", "Part", "Tap", "chain_of", "chains_of", "is_watched"]

TAP = "loka_tap"  # on a linear that somebody watches: who is shown what a chain does that begins there
HEADROOM = Scaling(history=16, margin=1)  # one doubling from step to step saturates nothing


@dataclass(frozen=True, eq=False)
class Part:
    """One link and the modules it consists of.

    Args:
        link: what it computes.
        linear: the nn.Linear.
        norm: the module whose weight, bias and eps the norm has; None without a norm. A batch norm is folded into the linear, and the link has none.
        passed: modules that hand on their input from now on: the norm, the activation, the dropout, identities.
        callers: modules whose forward calls the activation, or a dropout, as a function (`loka.lowp.passing`).
        called: whether one of them calls the activation.
        dropout: the nn.Dropout, whose mode and p say at every call what is drawn; or the module whose forward calls one as a function, with the p of the link. None: there is none.
    """

    link: Link
    linear: nn.Linear
    norm: nn.Module | None = None
    passed: tuple[nn.Module, ...] = ()
    callers: tuple[nn.Module, ...] = ()
    called: bool = False
    dropout: nn.Module | None = None

    def stops(self, p: float) -> int:
        """What is called between this linear and the next, and hands on what it is given, where dropout drops a share of p."""
        return len(self.passed) + self.called + (p > 0 and self.drops_in_call)

    @property
    def folds(self) -> bool:
        """Whether a batch norm is folded into the linear, for serving."""
        return isinstance(self.norm, nn.BatchNorm1d)

    @property
    def drops_in_call(self) -> bool:
        """Whether the dropout is a function that a forward calls, or a module in many places."""
        return self.dropout is not None and all(module is not self.dropout for module in self.passed)

    def find_p(self) -> float:
        """The share that is dropped now."""
        for module in self.passed:
            if module is not self.dropout and isinstance(module, nn.Dropout) and module.training and module.p > 0:
                raise ValueError(
                    f"a dropout behind {self.link.linear} has p {module.p:g} and is in training mode, and the chain was found without it, for serving or with p 0; "
                    "hint: loka.revert(model), and a plan made for training"
                )
        if self.dropout is None or not self.dropout.training or not draws_dropout():
            return 0.0
        p = self.dropout.p if isinstance(self.dropout, nn.Dropout) else self.link.dropout
        return check_p(float(p or 0.0), f"the dropout behind {self.link.linear}")


class Tap(Protocol):
    """Who watches a chain. It is asked in the steps in which it is on, and changes no number."""

    @property
    def on(self) -> bool:
        """Whether the step now running has a look."""

    def see(self, chain: "Chain", x: Tensor, y: Tensor, seed: Tensor | None) -> Tensor:
        """One call: what came in, what went out, what dropout was drawn from. Returns y, or the same numbers in a tensor whose gradient passes by."""


class Chain:
    """Linears that run in FP8 from one to the next.

    Args:
        name: of the unit, for records and messages.
        parts: first to last.
        precision: how it computes.
        bounded_input: x comes out of a BlockNorm: it has a static scale.
        scaling: how scales are remembered between steps.

    Example:
        >>> chain = Chain("top", [Part(Link("top.0", activation="relu"), model.top[0], passed=(model.top[1],)), Part(Link("top.2"), model.top[2])])
        >>> chain.place()
        >>> model(x)  # runs in FP8
        >>> chain.release()
    """

    @torch.inference_mode(False)  # its scales outlive the block they are made in
    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        precision: ChainPrecision | None = None,
        *,
        bounded_input: bool = False,
        scaling: Scaling = HEADROOM,
    ) -> None:
        _check(name, parts)
        self.name, self.parts, self.precision = name, tuple(parts), precision or ChainPrecision()
        self.bounded_input, self.scaling = bounded_input, scaling
        self.links = tuple(part.link for part in parts)
        self.linears = tuple(part.linear for part in parts)
        device = self.device
        last = len(parts) - 1
        self.out = [
            None if i == last or link.bounded else AmaxState(scaling, device, floor=link.floor)
            for i, link in enumerate(self.links)
        ]
        delayed = self.precision.gradient == "delayed"
        self.grad = [AmaxState(scaling, device) if delayed else None for _ in self.links]
        self.static = torch.full((), NORMALIZED_SCALE, device=device)
        self.input: AmaxState | None = None  # a calibrated scale of x, for serving; None: from x itself, or bounded
        self.bounds = [self.static.clone() for _ in self.links]  # one a link: a compiler takes no tensor twice
        self.primed, self.gradients_primed = (all(s is None for s in states) for states in (self.out, self.grad))
        self.frozen: list[QTensor] | None = None
        self.frozen_biases: dict[int, Tensor] = {}  # of links with a batch norm folded in, while the weights are frozen
        self._witnesses: list[Witness] | None = None  # of frozen weights; None where each call quantises them
        self._folded_types: set[torch.dtype] = set()  # of what was folded into them
        self.placed = False
        self.health: list[Tensor] | None = None  # one vector a link, where somebody counts
        self.watching = False
        self.callers = list({id(m): m for part in parts for m in part.callers}.values())
        self.pending: Tensor | None = None  # what is handed on, from the head's call to the last stop
        self._at = self._met = 0  # the link whose linear was met last, and how many stops since
        self._dropping = (0.0,) * len(parts)  # what each link dropped in the call whose result is handed on
        self.around: nn.Module | None = None  # the layer whose interactions are fused around it

    @property
    def tap(self) -> Tap | None:
        """Who watches its head."""
        tap: Tap | None = self.linears[0].__dict__.get(TAP)
        return tap

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.linears[0].weight.device

    @property
    def training(self) -> bool:
        """As its head."""
        return self.linears[0].training

    @property
    def remembered(self) -> list[AmaxState]:
        """The magnitudes that its scales come from."""
        return [state for state in (*self.out, *self.grad) if state is not None]

    def followed_weights(self) -> list[Tensor]:
        """The weights, as whoever owns them knows them."""
        return [weight for linear in self.linears if (weight := linear._parameters.get("weight")) is not None]

    def weights_changed(self, *, owned: bool) -> None:
        """An optimizer has made its step: nothing to do, weights that train are quantised in every forward."""

    # Placing

    def place(self) -> "Chain":
        """Change the classes of its modules. Refuses modules that somebody watches, naming them."""
        modules = [m for part in self.parts for m in (part.linear, *part.passed)]
        watched = [part.link.linear for part in self.parts if is_watched(part.linear)]
        watched += [
            f"{type(m).__name__} behind {part.link.linear}" for part in self.parts for m in part.passed if is_watched(m)
        ]
        if watched:
            raise ValueError(f"{self.name}: {', '.join(watched)} has forward or backward hooks that would see other tensors; hint: remove them first")  # fmt: skip
        if len({id(m) for m in modules}) < len(modules):
            raise ValueError(f"{self.name}: one module stands in it twice; a module of a chain is called once")
        if taken := [type(m).__name__ for m in modules if CHAIN in m.__dict__]:
            raise ValueError(f"{self.name}: {', '.join(taken)} is in a chain already; hint: loka.revert(model) first")
        for index, module in enumerate(modules):
            reclass(module, Head if index == 0 else Passed)
            module.__dict__[CHAIN] = self
        for caller in self.callers:
            add_call(caller, self)
        self.placed = True
        follow(self)
        return self

    def release(self) -> None:
        """The modules are what they were; parameters keep what was trained."""
        self.thaw()
        unfollow(self)
        for part in self.parts:
            for module in (part.linear, *part.passed):
                module.__dict__.pop(CHAIN, None)
                reclass(module, None)
        for caller in self.callers:
            drop_call(caller, self)
        self.placed, self.pending = False, None

    def split(self, site: str) -> list["Chain"]:
        """Put one linear back to high precision; what stands before and behind it stays in FP8.

        Args:
            site: the linear's name.

        Returns:
            The chains that are placed now: none, one or two. Scales go on from where they were.
        """
        names = [link.linear for link in self.links]
        if site not in names:
            raise ValueError(f"{self.name} has no linear {site!r}; it has {', '.join(names)}")
        at, placed = names.index(site), self.placed
        if placed:
            self.release()
        made: list[Chain] = []
        for begin, end in ((0, at), (at + 1, len(names))):
            if begin == end:
                continue
            bounded = (
                self.bounded_input if begin == 0 else self.links[at].bounded and self.parts[at].dropout is None
            )  # its 1 / (1 - p) knows no bound
            parts = (*self.parts[begin : end - 1], _as_last(self.parts[end - 1]))
            half = Chain(names[begin], parts, self.precision, bounded_input=bounded, scaling=self.scaling)
            half.primed, half.gradients_primed = self.primed, self.gradients_primed
            for mine, theirs in ((half.out, self.out), (half.grad, self.grad)):
                for index, state in enumerate(mine):
                    old = theirs[begin + index]
                    if state is not None and old is not None:
                        state.load(old.state())
                        state.saturated.copy_(old.saturated)
            made.append(half.place() if placed else half)
        return made

    # Handing on

    def begin(self, result: Tensor) -> None:
        """The head has run the chain: `result` goes through everything that stood between its linears and behind the last. Says where the call before left something of it out."""
        if self.pending is not None:
            self._refuse_rest("in the call before this one")
        self._at = self._met = 0
        self._dropping = tuple(part.find_p() for part in self.parts)
        self.pending = result if len(self.parts) > 1 or self._stops() else None

    def meet(self, given: Tensor, *, linear: bool) -> None:
        """A later module of the chain is called. A forward that takes another path than the example did is an error, never another number."""
        if given is not self.pending or (linear and self._met != self._stops()):
            self.pending = None
            raise RuntimeError(
                f"a module of the chain {self.name} was called with something other than what the chain made: this forward takes another path "
                "than the example the chain was found on; hint: loka.revert(model), and an example that takes this path"
            )
        self._at, self._met = (self._at + 1, 0) if linear else (self._at, self._met + 1)
        self._end_here()

    def meet_call(self, called: str, number: float) -> None:
        """A function is called on what is handed on: an activation with its slope, or a dropout with its p, 0 where it has no effect."""
        part, p = self.parts[self._at], self._dropping[self._at]
        link = part.link
        if called == "dropout":
            agrees = number == (p if part.drops_in_call else 0.0)
            said, has = f"a dropout with p {number:g}", f"drew one with p {p:g}"
        else:
            agrees = part.called and (called, number) == (link.activation, link.slope)
            said, has = called, f"has {link.activation}"
        if not agrees:
            self.pending = None
            raise RuntimeError(
                f"{said} was called behind {link.linear}, where the chain {self.name} {has}: this forward takes another path "
                "than the example the chain was found on; hint: loka.revert(model), and an example that takes this path"
            )
        self._met += called != "dropout" or number > 0
        self._end_here()

    def leave(self, caller: nn.Module) -> None:
        """The forward of a caller is over: what it calls behind the last linear must have been called."""
        if self.pending is not None and self._at == len(self.parts) - 1 and any(m is caller for m in self.parts[-1].callers):  # fmt: skip
            self._refuse_rest("in this call")

    def _refuse_rest(self, when: str) -> None:
        self.pending = None
        raise RuntimeError(
            f"the chain {self.name} has computed what stood behind {self.links[self._at].linear} when it was found, and {when} the model did not call all of it: that forward took another path "
            "than the example the chain was found on, or ended in an exception; hint: loka.revert(model), and an example that takes this path"
        )

    def _stops(self) -> int:
        return self.parts[self._at].stops(self._dropping[self._at])

    def _end_here(self) -> None:
        if self._at == len(self.parts) - 1 and self._met == self._stops():
            self.pending = None

    # Running

    @property
    def input_scale(self) -> Tensor | None:
        """The scale of x that is known before x comes; None: it is found from x."""
        if self.bounded_input:
            return self.static
        return None if self.input is None else self.input.scale

    def fix_input(self, amax: float) -> None:
        """Give the input a scale for the largest magnitude that calibration saw: serving needs no pass over x to find one."""
        self.input = AmaxState(self.scaling, self.device)
        self.input.start_from(amax)

    def layout(self, dtype: torch.dtype) -> Layout:
        """The chain without its tensors."""
        types = tuple(linear.weight.dtype for linear in self.linears)
        biases = tuple(
            part.linear.weight.dtype if part.folds else None if part.linear.bias is None else part.linear.bias.dtype
            for part in self.parts
        )
        dropout = tuple(part.find_p() for part in self.parts)
        return Layout(self.links, self.precision, dtype, types, biases, self.primed, self.gradients_primed, self.input_scale is not None, dropout)  # fmt: skip

    @staticmethod
    def draw_seed(layout: Layout, device: torch.device) -> Tensor | None:
        """A seed for what dropout draws in one call, from torch's generator on the device; None where nothing is drawn."""
        return torch.randint(2**62, (1,), device=device) if any(layout.dropout) else None

    def tensors(self, seed: Tensor | None = None) -> ChainTensors:
        """Its tensors, as they are now; without a seed nothing is dropped. An evaluation between two steps leaves no trace in the magnitudes; serving counts what saturates."""
        norms = [None if part.folds else part.norm for part in self.parts]
        weights, biases = zip(*self._parameters(), strict=True)
        counts = self.training or self.frozen is not None or not self.primed
        return ChainTensors(
            weights,
            biases,
            tuple(getattr(norm, "weight", None) for norm in norms),
            tuple(getattr(norm, "bias", None) for norm in norms),
            tuple(bound if link.bounded else None if s is None else s.scale for link, s, bound in zip(self.links, self.out, self.bounds, strict=True)),
            tuple(None if s is None or not counts else s.pending for s in self.out),
            tuple(None if s is None else s.scale for s in self.grad),
            tuple(None if s is None else s.pending for s in self.grad),
            seed,
        )  # fmt: skip

    def _parameters(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Weight and bias of every link, with what is folded into them."""
        for at, part in enumerate(self.parts):
            if at in self.frozen_biases:  # frozen: nobody asks for the weight
                refuse_training(part.norm, part.link.linear)
                yield part.linear.weight, self.frozen_biases[at].to(part.linear.weight.dtype)
            elif part.folds:
                yield fold(part.linear, cast(nn.BatchNorm1d, part.norm), part.link.linear)
            else:
                yield part.linear.weight, part.linear.bias

    def run(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the input's type, or autocast's where it is on."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        width = self.linears[0].in_features
        if x.shape[-1] != width:
            raise ValueError(f"{self.name} takes [..., {width}], got {tuple(x.shape)}")
        if x.dim() != 2 and any(part.folds for part in self.parts):
            raise ValueError(f"{self.name}: a batch norm is folded into it, which normalises the last dimension of [rows, {width}] alone; got {tuple(x.shape)}")  # fmt: skip
        if not torch.compiler.is_compiling():
            self._refuse_shards()
        flat, seed = x.reshape(-1, width), None
        # no function mode looks inside: what one writes down there, a compiler could not take out of an autograd function
        with torch.autocast(kind, enabled=False), torch._C.DisableTorchFunction():
            if flat.shape[0] == 0:
                y = self.run_exactly(flat.to(dtype))
            else:
                layout = self.layout(dtype)
                seed = self.draw_seed(layout, x.device)
                if self.needs_gradient(x):
                    y = ChainFunction.apply(flat, self.input_scale, layout, *self.tensors(seed).flatten())  # type: ignore[no-untyped-call]
                else:
                    y = self.infer(flat.detach(), layout, seed)
                if self.watching and self.health is not None:
                    self.look(flat, y, seed)
        y = y.reshape(*x.shape[:-1], self.linears[-1].out_features)
        tap = self.tap
        return y if tap is None or not tap.on else tap.see(self, x, y, seed)

    def _refuse_shards(self) -> None:
        """The head reads all weights: whoever shards them must gather them all before it runs."""
        if apart := [
            link.linear
            for link, linear in zip(self.links, self.linears, strict=True)
            if hasattr(linear.weight, "device_mesh")
        ]:
            raise ValueError(f"{self.name}: {', '.join(apart)} is sharded apart from the rest of its chain; hint: fully_shard a module that holds the whole chain")  # fmt: skip

    def needs_gradient(self, x: Tensor) -> bool:
        """Whether to run the differentiable form; a frozen chain has none, and says so where a gradient is asked for."""
        if self.frozen is None:
            return torch.is_grad_enabled()
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(f"{self.name} is frozen for serving and has no gradient, and its input asks for one; hint: torch.no_grad(), or model.train()")  # fmt: skip
        return False

    def infer(self, x: Tensor | QTensor, layout: Layout, seed: Tensor | None) -> Tensor:
        """Without gradients, from [M, K] in high precision or quantised already; `seed` of `draw_seed`."""
        weights = self._quantized_weights()  # first: it finds out whether what is frozen still holds
        tensors = self.tensors(seed)
        a = x if isinstance(x, QTensor) else quantize_input(x, self.input_scale, layout, rows=not self.training)
        y: Tensor | None = None
        for at, weight in enumerate(weights):
            step = run_link(a, weight, at, layout, tensors, training=False)
            a, y = (a if step.a is None else step.a), step.y
        assert y is not None
        return y

    def run_exactly(self, x: Tensor) -> Tensor:
        """The same layers in the precision of x."""
        for at in range(len(self.links)):
            x = self.run_link_exactly(x, at)
        return x

    def run_link_exactly(self, x: Tensor, at: int) -> Tensor:
        """One layer in the precision of x."""
        linear, norm = self.linears[at], self.parts[at].norm
        weight, bias = fold(linear, cast(nn.BatchNorm1d, norm)) if self.parts[at].folds else (linear.weight, linear.bias)  # fmt: skip
        x = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return follow_linear(x, self.links[at], getattr(norm, "weight", None), getattr(norm, "bias", None))

    # Weights for serving

    def _quantized_weights(self) -> list[QTensor]:
        if self.frozen is not None and self._are_frozen_current():
            return self.frozen
        return [self._quantize(part) for part in self.parts]

    def quantized_weight(self, at: int) -> QTensor:
        """A weight as the forward GEMM has it."""
        fresh = self.frozen is None or self._witnesses is None
        return self._quantize(self.parts[at]) if fresh else self.frozen[at]  # type: ignore[index]

    def _quantize(self, part: Part) -> QTensor:
        device = part.linear.weight.device if self.frozen is None else self.frozen[0].device
        weight = fold(part.linear, cast(nn.BatchNorm1d, part.norm), part.link.linear)[0] if part.folds else part.linear.weight  # fmt: skip
        return quantize(weight.detach().to(device), TENSOR_SPEC, backend=self.precision.quantize_backend)

    def _are_frozen_current(self) -> bool:
        """Whether nobody has written to a weight since it was frozen. Says once where somebody has; from then on every call quantises the chain's weights."""
        if torch.compiler.is_compiling() or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return True
        if self._witnesses is None:
            return False
        if (
            self._folded_types != self._find_folded_types()
        ):  # cast: other bits of the same numbers, as Witness has it for weights
            self._call_witnesses()
        pairs = zip(self._witnessed(), self._witnesses, strict=True)
        changed = [name for (name, held), witness in pairs if not witness.agrees(held)]
        if changed:
            warn_stale(", ".join(dict.fromkeys(changed)))
            self._witnesses, self.frozen_biases = None, {}
        return not changed

    def freeze(self, *, offload: bool = False) -> None:
        """Quantise the weights once, for serving; they are not followed any more until `thaw`.

        Args:
            offload: move the weights in high precision to the host meanwhile: a frozen chain then takes half the memory of a 16-bit one, not one and a half.
        """
        if not self.primed:
            raise ValueError(f"{self.name} has no scales yet; hint: with loka.placing.calibrating(model): model(batch)")
        self.thaw()
        self._fix_weights()
        if offload:
            self._move_weights(torch.device("cpu"))
        self._call_witnesses()

    def _fix_weights(self) -> None:
        """Quantise what the forward multiplies now, and compute what it adds."""
        self.frozen_biases = {}
        self.frozen = [self._quantize(part) for part in self.parts]
        with torch.no_grad():
            made = {at: bias for at, (_, bias) in enumerate(self._parameters()) if self.parts[at].folds}
        self.frozen_biases = {at: bias.to(self.frozen[0].device) for at, bias in made.items() if bias is not None}

    def _call_witnesses(self) -> None:
        """Remember what frozen weights were made from."""
        self._witnesses = [Witness(held) for _, held in self._witnessed()]
        self._folded_types = self._find_folded_types()

    def _find_folded_types(self) -> set[torch.dtype]:
        tensors = [(part.linear.bias, part.norm.running_mean, part.norm.weight) for part in self.parts if isinstance(part.norm, nn.BatchNorm1d)]  # fmt: skip
        return {tensor.dtype for three in tensors for tensor in three if tensor is not None}

    def _witnessed(self) -> Iterator[tuple[str, Tensor]]:
        """What frozen weights were made from, by the linear's name."""
        for part in self.parts:
            yield part.link.linear, part.linear.weight
            if part.folds:
                yield part.link.linear, statistics(part.linear, cast(nn.BatchNorm1d, part.norm))

    def thaw(self) -> None:
        """Follow the weights again."""
        if self.frozen is not None:
            self._move_weights(self.frozen[0].device)
        self.frozen, self.frozen_biases = None, {}

    def refresh(self) -> None:
        """Frozen weights made anew, where they were changed by hand or loaded; weights that train are quantised in every forward."""
        if self.frozen is not None:
            self._fix_weights()
            self._call_witnesses()

    def _move_weights(self, device: torch.device) -> None:
        for linear in self.linears:
            if linear.weight.device != device:
                linear.weight.data = linear.weight.data.to(device)

    # Scales

    def start_from(self, magnitudes: Mapping[str, tuple[float, float]]) -> bool:
        """Take the first scales from magnitudes that were measured before.

        Args:
            magnitudes: for a linear's name, the largest |output before the activation| and the largest |gradient of it|.

        Returns:
            Whether all were there, so that the first step runs as all others will.
        """
        for link, out, grad in zip(self.links, self.out, self.grad, strict=True):
            known = magnitudes.get(link.linear, (0.0, 0.0))
            for state, amax in ((out, known[0]), (grad, known[1])):
                if state is not None and amax > 0:
                    state.start_from(amax)
        self.find_primed()
        return self.primed and self.gradients_primed

    def find_primed(self) -> None:
        """Whether all scales are known, forward and backward. Waits for the device."""
        self.primed, self.gradients_primed = (
            all(bool(s.largest > 0) for s in states if s is not None) for states in (self.out, self.grad)
        )

    def after_step(self) -> None:
        """Called when a step's magnitudes are filed. Waits for the device until all scales are known, and never again."""
        if self.primed and self.gradients_primed:
            return
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.find_primed()

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Batches run in this block set the scales between layers; one that ends in an exception changes nothing."""
        states = [state for state in self.out if state is not None]
        before, primed = [state.state() for state in states], self.primed
        self.primed = not states
        for state in states:
            state.pending.zero_()
        try:
            yield
            seen = [float(state.pending) for state in states]
            if not all(seen):
                raise ValueError(
                    f"calibration saw no finite value other than zero in the chain {self.name}; run more batches"
                )
            for state, amax in zip(states, seen, strict=True):
                state.start_from(amax)
                state.pending.zero_()
            self.primed = True
        except BaseException:
            for state, old in zip(states, before, strict=True):
                state.load(old)
            self.primed = primed
            raise

    def to(self, device: torch.device) -> None:
        """Follow the parameters."""
        for state in (*self.remembered, *([] if self.input is None else [self.input])):
            state.to(device)
        self.static, self.bounds = self.static.to(device), [bound.to(device) for bound in self.bounds]
        if self.health is not None:
            self.health = [vector.to(device) for vector in self.health]
        if self.frozen is not None:
            self.frozen = [replace(q, data=q.data.to(device), scale=q.scale.to(device)) for q in self.frozen]
        self.frozen_biases = {at: bias.to(device) for at, bias in self.frozen_biases.items()}

    # Being looked at

    @torch.no_grad()
    def look(self, x: Tensor, y: Tensor, seed: Tensor | None) -> None:
        """Every layer on sampled rows, in float32 beside FP8; the last beside what the whole batch made, which shows a kernel that fails at its true size.

        Dropout leaves a code in FP8 or makes it zero, so each layer is compared without it, and what it hands on then loses what the rows lost in the whole batch.
        """
        assert self.health is not None
        dtype, turn = y.dtype, turn_of(self.health[0], FORWARD)
        layout, tensors = self.layout(dtype), self.tensors()._replace(pending=(None,) * len(self.links))
        drawn = tensors._replace(seed=seed)
        rows = sampled_rows(x.shape[0], turn)
        exact = x.index_select(0, rows)
        scale = self.input_scale
        if scale is None:
            scale = scale_from_amax(find_amax(x), STATIC_SPEC)
        a = quantize(
            exact, STATIC_SPEC, scale=scale
        )  # as training has it: one scale for all rows, which a huge row takes from the others
        exact = exact.float()
        for at, weight in enumerate(self._quantized_weights()):
            wanted = self.run_link_exactly(exact, at)
            step = run_link(a, weight, at, layout, tensors, training=False)
            draw = drawn.draw(at, layout)
            got = y.index_select(0, rows) if step.a is None else step.a.dequantize()
            if step.a is None and draw is not None:
                wanted = wanted * keep_mask(draw, rows, wanted.shape[1]) * factor_of(draw.p)
            error = row_error(got, wanted) if self.primed or step.a is None else torch.zeros_like(turn)
            last = step.a is None
            # what went into this layer; the last one's output is that of the whole batch, and so is what it is blamed for
            given = torch.stack([_extent(exact), _extent(x)]) if last or at == 0 else exact
            record(self.health[at], FORWARD, given, self.linears[at].weight, (y if last else got,), error)
            if step.a is not None:
                a = step.a if draw is None else _drop(step.a, draw, rows)
                exact = a.dequantize()

    def count_saturated(self) -> list[Tensor | None]:
        """For every link, how many steps' magnitudes did not fit their scale since the beginning; in serving, whether any has not. None where scales cannot saturate."""
        counts: list[Tensor | None] = []
        for out, grad in zip(self.out, self.grad, strict=True):
            states = [state for state in (out, grad) if state is not None]
            now = [
                (s.pending > s.scale * STATIC_SPEC.format.max).float() if self.frozen is not None else s.saturated
                for s in states
            ]
            counts.append(torch.stack(now).sum() if now else None)
        return counts

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.placed:
            follow(self)

    def __repr__(self) -> str:
        widths = [self.linears[0].in_features, *(linear.out_features for linear in self.linears)]
        primed = self.primed and self.gradients_primed
        state = ", frozen" if self.frozen is not None else "" if primed else ", scales not known yet"
        return f"Chain({self.name}: {' -> '.join(map(str, widths))}, {self.precision}{state})"


def follow_linear(p: Tensor, link: Link, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What stands behind a linear, in the precision of p: its norm, with the norm's own weight and bias, and its activation."""
    if link.norm == "block":
        p = BlockNorm.forward(BlockNorm(p.shape[-1], block=NORM_BLOCK), p)
    elif link.norm != "none":
        weight, bias = (None if t is None else t.to(p.dtype) for t in (weight, bias))
        size = (p.shape[-1],)
        p = F.layer_norm(p, size, weight, bias, link.eps) if link.norm == "layer" else F.rms_norm(p, size, weight, link.eps)  # fmt: skip
    return activate(p, link.activation, link.slope)


def _drop(q: QTensor, draw: Dropout, rows: Tensor) -> QTensor:
    """What is left of some rows, as the kernels leave it."""
    kept = keep_mask(draw, rows, q.shape[1]).to(torch.uint8)
    return QTensor((q.data.view(torch.uint8) * kept).view(q.data.dtype), q.scale * factor_of(draw.p), q.spec)


def _extent(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"))
    return largest.float()


def _check(name: str, parts: Sequence[Part]) -> None:
    if not parts:
        raise ValueError(f"{name}: a chain needs at least one linear")
    width: int | None = None
    for index, part in enumerate(parts):
        linear, link = part.linear, part.link
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"{name}: {link.linear} is a {type(linear).__name__}, expected nn.Linear")
        if width is not None and linear.in_features != width:
            raise ValueError(f"{name}: {link.linear} takes {linear.in_features} features, the layer before it gives {width}")  # fmt: skip
        if link.norm in ("layer", "rms") and index == len(parts) - 1:
            raise ValueError(
                f"{name}: {link.linear} is the last linear; its {link.norm} norm stays outside of the chain"
            )
        width = linear.out_features


def _as_last(part: Part) -> Part:
    """A part that ends a chain: a norm over the whole row runs as a module of its own, and what follows it; so does a dropout with nothing in front of it, as the library's GEMM draws none."""
    alone = part.link.plain and part.dropout is not None
    return Part(Link(part.link.linear), part.linear) if alone or part.link.norm in ("layer", "rms") else part
