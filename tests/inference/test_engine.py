"""The engine finds what the plain beam search finds, whatever the model, the constraint, the bucket and the company."""

import dataclasses
from fnmatch import fnmatch

import pytest
import torch

import loka
from loka.inference import Engine, EngineConfig, EngineMemoryError, Request, estimate_memory
from loka.inference.config import choose_bucket
from loka.inference.constraint import Listed, Masked, Unconstrained
from loka.inference.decoder import beam_widths
from loka.inference.tuning import FEW_ROWS
from loka.inference.weights import PackedExperts
from loka.models.onerec import Experts
from loka.nn import Style
from loka.ptq import quantize
from loka.semantic_ids import Trie
from loka.semantic_ids.trie import build_trie

from .small import make_index, make_model, make_requests, search_plainly

LENGTHS = (0, 3, 7, 16, 20)  # empty, short, long, the longest, and longer than the model takes
VARIANTS = {
    "dense": ("tiny", {}),
    "mixture": ("tiny-moe", {}),
    "no shared expert": ("tiny-moe", {"experts": Experts(routed=4, top=2, hidden=32, shared=0, dense_blocks=1)}),
    "wide shared experts": ("tiny-moe", {"experts": Experts(routed=4, top=2, hidden=32, shared=2, dense_blocks=0)}),
    "values of their own": ("tiny-moe", {"s_kv": 2, "l_kv": 2, "g_kv": 2}),
    "two levels": ("tiny", {"codebooks": (48, 24)}),
    "five levels": ("tiny", {"codebooks": (16, 8, 8, 8, 4)}),
    "one level": ("tiny", {"codebooks": (100,)}),
    "user features": ("tiny", {"static": 5}),
    "a table of items": ("tiny", {"items": 50}),
    "layer norm, bias, relu": ("tiny", {"norm": "layer", "bias": True, "activation": "relu"}),
    "block norm": ("tiny", {"norm": "block"}),
    "no norm": ("tiny", {"norm": "none"}),
}


def make_engine(model: object, valid: Trie | None = None, **options: object) -> Engine:
    return Engine(model, EngineConfig(**{"beams": 20, "requests": (1, 8), "dtype": "fp32", **options}), valid=valid)


def assert_same(model: object, engine: Engine, valid: Trie | None, *, beams: int = 20) -> None:
    requests = make_requests(model, LENGTHS)
    expected = search_plainly(model, requests, beams, valid, engine.config.normalize)
    for row, found in enumerate(engine.generate(requests)):
        alive = expected.scores[row] > float("-inf")
        assert torch.equal(found.codes, expected.codes[row][alive])
        torch.testing.assert_close(found.scores, expected.scores[row][alive], rtol=1e-4, atol=1e-4)
        assert found.cut == max(0, LENGTHS[row] - model.config.context)
        if valid is not None:
            assert torch.equal(found.items, expected.items[row][alive])


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_plain_search(variant: str, constrained: bool) -> None:
    size, options = VARIANTS[variant]
    model = make_model(size, **options)
    valid = make_index(model).trie if constrained else None
    assert_same(model, make_engine(model, valid), valid)


@pytest.mark.parametrize("recipe", ["onerec", "onerec_rows", "onerec_mixed", "blockwise"])
@pytest.mark.parametrize("fold", [False, True])
def test_equals_the_plain_search_of_a_quantised_model(fold: bool, recipe: str) -> None:
    model = make_model("tiny-moe", layers=3)
    quantize(model, recipe, keep=("*.router", "heads.*", "context.*"))
    valid = make_index(model).trie
    engine = make_engine(model, valid, fold_shared=fold)
    assert isinstance(engine.packed.blocks[1].ffn, PackedExperts)
    assert engine.packed.blocks[1].ffn.always == fold
    assert_same(model, engine, valid)


def test_a_converted_model_is_packed_as_it_was_converted() -> None:
    model, twin = make_model("tiny-moe"), make_model("tiny-moe")
    kept = ("*.router", "heads.*", "context.*", "*.ffn.gate_up", "*.ffn.down")
    loka.convert(model, recipe="rowwise", module_filter_fn=lambda _, name: not any(fnmatch(name, k) for k in kept))
    quantize(twin, "rowwise", keep=kept)
    first, second = make_engine(model), make_engine(twin)
    assert str(first.packed.blocks[0].query.activation) == "e4m3:row"
    for a, b in zip(*(e.generate(make_requests(model, LENGTHS)) for e in (first, second)), strict=True):
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scores, b.scores)


def test_quantised_only_in_part() -> None:
    model = make_model("tiny-moe")
    quantize(model, keep=("blocks.1.ffn.down", "blocks.0.*"))
    assert_same(model, make_engine(model), None)


def test_the_fused_experts_are_the_same_experts() -> None:
    model = make_model("tiny-moe")
    quantize(model)
    plain, fused = make_engine(model), make_engine(model)
    tuned = fused.tuning.tuned(8)
    blocks = [
        dataclasses.replace(b, ffn=dataclasses.replace(b.ffn, fused=True)) if isinstance(b.ffn, PackedExperts) else b
        for b in tuned.blocks
    ]
    for rows in (1, 8, 20, 160):
        fused.tuning._made[rows] = dataclasses.replace(tuned, blocks=blocks)
    for a, b in zip(*(e.generate(make_requests(model, LENGTHS)) for e in (plain, fused)), strict=True):
        torch.testing.assert_close(a.scores, b.scores, rtol=1e-2, atol=1e-2)


def test_a_context_in_fp8_is_the_rounded_context() -> None:
    model = make_model()
    requests = make_requests(model, (12, 5, 0))
    low, plain = (Engine(model, EngineConfig(beams=8, dtype="fp32", context_cache=c)) for c in ("e4m3", "plain"))
    found = low.generate(requests)
    pack = plain.context
    rounded = lambda *given: [(k.to(torch.float8_e4m3fn).float(), v.to(torch.float8_e4m3fn).float()) for k, v in pack(*given)]  # noqa: E731  # fmt: skip
    prepared = plain.prepare(plain.bucket_for(requests))
    prepared.decoder.context = rounded  # type: ignore[assignment]
    for ours, law in zip(found, plain.generate_in(plain.bucket_for(requests), requests), strict=True):
        assert torch.equal(ours.codes, law.codes)
        torch.testing.assert_close(ours.scores, law.scores)
    codes = torch.zeros(1, 4, model.config.history_width, dtype=torch.int64)
    assert {t.dtype for pair in low.context(codes, None, low.glue) for t in pair} == {torch.float8_e4m3fn}


def test_torch_compile_can_trace_the_glue() -> None:
    model = make_model("tiny-moe")
    engine = make_engine(model, make_index(model).trie)
    from loka.inference.glue import Glue

    engine.glue = Glue(fuse=True, backends={}, compiler="aot_eager")
    for constraint in engine.constraints:
        if isinstance(constraint, Listed):
            constraint.lse = engine.glue.lse
    assert_same(model, engine, engine.trie)


def test_compiled_glue_serves_many_engines_in_one_process() -> None:
    """torch.compile raises after eight compilations of the same code: here are three models, histories short and long."""
    from loka.inference.glue import Glue
    from loka.inference.weights import PackedNorm

    compiled, eager = (Glue(fuse=fuse, backends={}, compiler="eager") for fuse in (True, False))
    for width, kind, eps in ((32, "rms", 1e-6), (48, "layer", 1e-5), (64, "rms", 1e-5)):
        norm = PackedNorm(kind, torch.randn(width), None, eps)
        for requests, parts in ((1, 1), (3, 1), (1, 2), (3, 2), (1, 3), (3, 3)):
            tokens = [torch.randn(requests, 1 + 4 * place, width) for place in range(parts)]
            torch.testing.assert_close(compiled.join(tokens, norm), eager.join(tokens, norm))


class TestConstraints:
    def test_every_way_is_taken_and_gives_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_model("tiny")
        index = make_index(model, items=1500)
        kinds = [type(c) for c in make_engine(model, index.trie).constraints]
        assert kinds == [Masked, Masked, Listed]
        for share, table in ((0, 2**27), (1, 2**27), (0, 0)):
            monkeypatch.setattr("loka.inference.constraint.LISTED_SHARE", share or 10**9)
            monkeypatch.setattr("loka.inference.constraint.TABLE_BYTES", table)
            engine = make_engine(model, index.trie)
            if not table:
                assert all(c.table is None for c in engine.constraints)
            assert_same(model, engine, index.trie)
        assert all(isinstance(c, Unconstrained) for c in make_engine(model).constraints)

    def test_probabilities_of_valid_ids(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_model("tiny")
        index = make_index(model, items=1500)
        for share, table in ((4, 2**27), (10**9, 2**27), (10**9, 0)):
            monkeypatch.setattr("loka.inference.constraint.LISTED_SHARE", share)
            monkeypatch.setattr("loka.inference.constraint.TABLE_BYTES", table)
            assert_same(model, make_engine(model, index.trie, normalize="valid"), index.trie)
        few = make_index(model, items=7)
        (found,) = make_engine(model, few.trie, normalize="valid", beams=50).generate(make_requests(model, (4,)))
        assert float(found.scores.exp().sum()) == pytest.approx(1.0, abs=1e-4)  # all there is
        with pytest.raises(ValueError, match="needs valid ids"):
            make_engine(model, normalize="valid")

    def test_fewer_valid_items_than_beams(self) -> None:
        model = make_model("tiny")
        index = make_index(model, items=7)
        engine = make_engine(model, index.trie, beams=50)
        for found in engine.generate(make_requests(model, (0, 5))):
            assert sorted(found.items.tolist()) == sorted(index.items.tolist())
            assert bool((found.scores.diff() <= 0).all())
        assert_same(model, engine, index.trie, beams=50)

    def test_a_single_valid_item(self) -> None:
        model = make_model("tiny")
        trie = build_trie(torch.tensor([[1, 2, 3]]), (32, 32, 32), torch.tensor([9]))
        (found,) = make_engine(model, trie, beams=8).generate(make_requests(model, (4,)))
        assert found.items.tolist() == [9]

    def test_other_codebooks_are_refused(self) -> None:
        model = make_model("tiny")
        trie = build_trie(torch.tensor([[1, 2]]), (32, 32), torch.tensor([9]))
        with pytest.raises(ValueError, match=r"codebooks \(32, 32\), the model \(32, 32, 32\)"):
            make_engine(model, trie)

    def test_beams_beyond_the_first_codebook(self) -> None:
        model = make_model("tiny")
        assert beam_widths(model.config.codebooks, 600) == [1, 32, 600, 600]
        requests = make_requests(model, LENGTHS)
        expected = search_plainly(model, requests, 600, None)
        for row, found in enumerate(make_engine(model, beams=600).generate(requests)):
            torch.testing.assert_close(found.scores, expected.scores[row], rtol=1e-5, atol=1e-5)
            keys = [set(map(tuple, codes.tolist())) for codes in (found.codes, expected.codes[row])]
            assert len(keys[0] & keys[1]) >= 599  # two beams in the last digit of float32 may change places at the end


class TestCompany:
    def test_batch_invariant_results_do_not_depend_on_the_batch(self) -> None:
        model = make_model("tiny-moe", layers=3)
        quantize(model)
        valid = make_index(model, items=2000).trie
        engine = make_engine(model, valid, batch_invariant=True, requests=(2, 8), contexts=(4, 16), dtype="bf16")
        assert engine.buckets == [(8, 16)]
        requests = make_requests(model, (0, 3, 16, 9, 1, 20, 12, 5))
        together = engine.generate(requests)
        for place, request in enumerate(requests):
            (alone,) = engine.generate([request])
            assert torch.equal(alone.items, together[place].items)
            assert torch.equal(alone.scores, together[place].scores)
        back = engine.generate(requests[::-1])[::-1]
        assert all(torch.equal(a.items, b.items) for a, b in zip(together, back, strict=True))

    def test_the_same_again(self) -> None:
        model = make_model("tiny-moe")
        runs = [make_engine(model, dtype="bf16").generate(make_requests(model, LENGTHS)) for _ in range(2)]
        assert all(torch.equal(a.scores, b.scores) for a, b in zip(*runs, strict=True))

    def test_more_requests_than_the_largest_bucket(self) -> None:
        model = make_model("tiny")
        requests = make_requests(model, (3,) * 19)
        found = make_engine(model).generate(requests)
        assert len(found) == 19
        (alone,) = make_engine(model).generate(requests[17:18])
        assert torch.equal(found[17].codes, alone.codes)
        assert make_engine(model).generate([]) == []

    def test_warm_prepares_every_bucket(self) -> None:
        engine = make_engine(make_model("tiny"), requests=(1, 2), contexts=(8, 16))
        engine.warm()
        assert set(engine._prepared) == set(engine.buckets)

    def test_buckets(self) -> None:
        buckets = EngineConfig(requests=(1, 4), contexts=(8, 16)).buckets(16)
        assert choose_bucket(buckets, 1, 0) == (1, 8)
        assert choose_bucket(buckets, 2, 9) == (4, 16)
        assert choose_bucket(buckets, 4, 10**6) == (4, 16)
        with pytest.raises(ValueError, match="do not fit"):
            choose_bucket(buckets, 5, 1)
        with pytest.raises(ValueError, match="the model was built for 10"):
            EngineConfig(contexts=(16,)).buckets(10)


class TestRefusals:
    def test_requests_that_do_not_fit(self) -> None:
        engine = make_engine(make_model("tiny"))
        good = Request(torch.zeros(2, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"request 1: code 32 of item 0, level 2"):
            engine.generate([good, Request(torch.tensor([[0, 0, 32]]))])
        with pytest.raises(ValueError, match=r"request 0: a history is int64 \[items, 3\]"):
            engine.generate([Request(torch.zeros(2, 2, dtype=torch.int64))])
        with pytest.raises(ValueError, match="user features"):
            engine.generate([Request(good.history, torch.zeros(4))])

    def test_configurations(self) -> None:
        model = make_model("tiny")
        for options, words in (
            ({"beams": 0}, "at least one"),
            ({"requests": ()}, "ascending"),
            ({"requests": (4, 2)}, "ascending"),
            ({"dtype": "fp8"}, "expected one of"),
            ({"graphs": True}, "CUDA graphs were requested"),
            ({"backends": (("router", "triton"),)}, "asks for router: 'triton'; an engine runs quantize, "),
            ({"backends": (("route", "torch"),)}, "asks for route: 'torch'; route has auto, triton, reference"),
        ):
            with pytest.raises(ValueError, match=words):
                make_engine(model, **options)
        with pytest.raises(ValueError, match="runs OneRec"):
            Engine(torch.nn.Linear(2, 2))

    @pytest.mark.parametrize("norm", ["none", "rms"])
    def test_a_context_in_fp8_needs_normed_keys(self, norm: str) -> None:
        model = make_model(style=Style(norm=norm))
        wanted = "this model has none" if norm == "none" else "gains of 0.125, expected 0.25 to 16"
        if norm == "rms":
            with torch.no_grad():
                model.context.chunk_norms[0].weight.fill_(0.125)
        with pytest.raises(ValueError, match=wanted):
            Engine(model, EngineConfig(beams=8, dtype="fp32", context_cache="e4m3"))

    def test_too_little_memory_is_said_with_the_size(self) -> None:
        model = make_model("tiny-moe")
        config = EngineConfig(beams=20, requests=(1, 8), dtype="fp32")
        needed = estimate_memory(model, config, config.buckets(16))
        assert needed.total > sum(p.nbytes for p in model.parameters())
        with pytest.raises(EngineMemoryError, match=r"needs .* GiB \(.* weights, .* caches, .* working set\)"):
            make_engine(model, memory=needed.total - 1)
        make_engine(model, memory=needed.total)

    def test_memory_of_the_published_model(self) -> None:
        from loka.models import build

        with torch.device("meta"):
            model = build("onerec", "4b-a0.5b", context=3000)
        config = EngineConfig(beams=512, requests=(16,))
        needed = estimate_memory(model, config, config.buckets(3000))
        assert 15e9 < needed.weights < 17e9  # 8.3 GB, and the experts once more with the shared one among them
        assert needed.total < 60e9


def test_without_measuring_the_order_of_the_registry_decides_on_a_cpu() -> None:
    model = make_model("tiny-moe")
    quantize(model)
    tuned = make_engine(model, tune=False).tuning.tuned(1)
    assert {block.query.bound.backend for block in tuned.blocks} == {"auto"}


@pytest.mark.gpu
def test_few_and_many_rows_have_their_own_backends_on_a_gpu() -> None:
    model = make_model("small", codebooks=(64, 64, 64), layers=2)
    quantize(model)
    tuning = make_engine(model.cuda(), dtype="bf16", tune=False).tuning
    many = 128 * 132  # a tile of 128 rows for each of 132 multiprocessors
    backends = {
        rows: {block.qkv.bound.backend for block in tuning.tuned(rows).blocks} for rows in (8, FEW_ROWS + 1, many)
    }
    assert backends == {8: {"triton"}, FEW_ROWS + 1: {"auto"}, many: {"cublaslt"}}
    chosen = make_engine(model, dtype="bf16", tune=False, backends=(("scaled_mm", "torch"),)).tuning
    assert {block.qkv.bound.backend for block in chosen.tuned(8).blocks} == {"torch"}


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True])
def test_graphs_on_a_gpu_equal_the_plain_search(low: bool) -> None:
    model = make_model(
        "small", codebooks=(64, 64, 64), layers=2, experts=Experts(routed=4, top=2, hidden=128, dense_blocks=1)
    )
    if low:
        quantize(model)
    model = model.cuda()
    engine = make_engine(model, make_index(model, 2000).trie, dtype="bf16", beams=64, requests=(1, 4))
    cpu = make_model(
        "small", codebooks=(64, 64, 64), layers=2, experts=Experts(routed=4, top=2, hidden=128, dense_blocks=1)
    )
    requests = make_requests(cpu, (0, 30, 50, 12))
    expected = search_plainly(cpu, requests, 64, make_index(cpu, 2000).trie)
    for row, found in enumerate(engine.generate(requests)):
        common = set(found.items.tolist()) & set(expected.items[row].tolist())
        assert len(common) >= (46 if low else 58)  # on a CPU 53 and 62
    again = engine.generate(requests)
    assert all(torch.equal(a.items, b.items) for a, b in zip(again, engine.generate(requests), strict=True))
