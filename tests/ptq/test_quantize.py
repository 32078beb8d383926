"""Recipes, the swap, the bound, and the size of what comes out."""

import copy
import json
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import loka
from loka.data.batch import Jagged
from loka.dispatch.recipe import choice_of, recipe_named
from loka.models import build
from loka.models.onerec import OneRec, semantic_id_loss
from loka.placing import plan_everything
from loka.ptq import (
    QuantizedExperts,
    QuantizedLinear,
    export_compressed_tensors,
    load_quantized,
    quantization_config,
    quantize,
    save,
    size_in_bytes,
)
from loka.records import GEMMS, Plan, SitePlan


def make(size: str = "tiny-moe", seed: int = 0, **options: object) -> OneRec:
    torch.manual_seed(seed)
    model = build("onerec", size, **options)
    assert isinstance(model, OneRec)
    return model.eval()


def requests(model: OneRec, rows: int = 6) -> tuple[Jagged, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 12, (rows,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    sizes = torch.tensor(model.config.codebooks)
    values = (torch.rand(int(offsets[-1]), len(sizes), generator=g) * sizes).long()
    return Jagged(values, offsets), (torch.rand(rows, len(sizes), generator=g) * sizes).long()


def test_experts_per_row_on_request() -> None:
    plain, rows = make(), make()
    quantize(plain, "onerec")
    quantize(rows, "onerec_rows")
    before = dict(plain.named_modules())
    for name, module in rows.named_modules():
        if isinstance(module, QuantizedExperts | QuantizedLinear):
            assert str(module.activation) == str(module.weight_spec) == "e4m3:row", name
        else:
            assert type(module) is type(before[name])
    mixed = make()
    quantize(mixed, "onerec_mixed")
    for part in (mixed.blocks[1].ffn, mixed.blocks[1].ffn.shared):
        assert (str(part.gate_up.bound.a), str(part.gate_up.bound.b)) == ("e4m3:row", "e4m3:row")
        assert (str(part.down.bound.a), str(part.down.bound.b)) == ("e4m3:1x128", "e4m3:128x128")
    assert str(mixed.blocks[0].ffn.down.activation) == "e4m3:row"  # a dense FFN
    assert rows.blocks[1].ffn.down.weight_scale.shape == (*rows.blocks[1].ffn.down.weight.shape[:2], 1)


def test_onerec_recipe_quantises_what_it_says_and_keeps_the_rest() -> None:
    model = make()
    summary = quantize(model, "onerec")
    modules = dict(model.named_modules())
    experts = modules["blocks.1.ffn.down"]
    assert isinstance(experts, QuantizedExperts)
    assert (str(experts.activation), str(experts.weight_spec)) == ("e4m3:1x128", "e4m3:128x128")
    query = modules["blocks.0.cross.query"]
    assert isinstance(query, QuantizedLinear)
    assert (str(query.activation), str(query.weight_spec)) == ("e4m3:row", "e4m3:row")
    assert type(modules["blocks.1.ffn.router"]) is nn.Linear
    assert type(modules["heads.0.linear"]) is nn.Linear
    assert type(modules["context.project"]) is nn.Linear
    assert {"heads.0.linear", "blocks.1.ffn.router", "context.long"} <= set(summary.kept)
    assert "router" in summary.kept["blocks.1.ffn.router"]
    assert all(site.weight_error is None or 0 < site.weight_error < 0.05 for site in summary.record.sites)


def test_outputs_stay_close_and_are_not_the_same() -> None:
    model = make()
    history, codes = requests(model)
    before = model(history, codes)
    quantize(model)
    after = model(history, codes)
    for a, b in zip(before, after, strict=True):
        assert 0 < (a - b).norm() / a.norm() < 0.2


def test_casts_leave_the_bytes_alone() -> None:
    model = make()
    quantize(model)
    module = model.get_submodule("blocks.0.cross.query")
    bytes_, scale = module.codes.clone(), module.weight_scale.clone()
    assert module.weight.dtype == torch.float32
    model.to(torch.bfloat16).half().double()
    assert module.weight.dtype == torch.float64
    assert module.codes.dtype == torch.float8_e4m3fn
    assert torch.equal(module.codes.view(torch.uint8), bytes_.view(torch.uint8))
    assert module.weight_scale.dtype == torch.float32
    assert torch.equal(module.weight_scale, scale)


def test_the_published_model_shrinks_to_fp8_size() -> None:
    with torch.device("meta"):
        model = build("onerec", "4b-a0.5b")
    before = size_in_bytes(model, 2)
    assert 8.2e9 < before < 8.4e9
    summary = quantize(model)
    assert summary.record.bytes_before == before
    assert summary.record.ratio <= 0.55
    assert size_in_bytes(model, 2) == summary.record.bytes_after


def test_one_pattern_to_keep_may_be_given_as_it_is() -> None:
    summary = quantize(nn.ModuleDict({"head": nn.Linear(16, 16), "body": nn.Linear(16, 16)}), "rowwise", keep="he*")
    assert summary.kept == {"head": "asked for by keep='he*'"}


def test_any_model_is_quantised_and_refusals_say_why() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3))
    x = torch.randn(5, 20)
    before = model(x)
    summary = quantize(model, "rowwise", keep=("2",))
    assert summary.quantized == ["0"]
    assert summary.kept == {"2": "asked for by keep='2'"}
    assert 0 < (model(x) - before).norm() / before.norm() < 0.1
    with pytest.raises(ValueError, match="already quantized: 0"):
        quantize(model)
    with pytest.raises(ValueError, match=r"matches no site; sites are 0$"):
        quantize(nn.Sequential(nn.Linear(2, 2)), keep=("nothing.*",))
    with pytest.raises(ValueError, match="no recipe 'fp8'"):
        quantize(nn.Sequential(nn.Linear(2, 2)), "fp8")
    with pytest.raises(ValueError, match="nothing to quantize"):
        quantize(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="needs a score"):
        quantize(nn.Sequential(nn.Linear(2, 2)), bound=0.1)


class TestBound:
    """A model in which one site is made to hurt: a column of activations a thousand times larger than the others, under one scale per token."""

    @staticmethod
    def subject() -> tuple[nn.Module, object]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 1, bias=False)
        )
        x = torch.randn(400, 64)
        with torch.no_grad():
            model[0].weight[0] *= 1e5  # the second linear then sees one huge feature ...
            model[1].weight[:, 0] = 0  # ... that its weight ignores: only the scale suffers
            y = model(x)
        noise = 0.05 * torch.randn(400, 1)

        def score(m: nn.Module) -> tuple[torch.Tensor, None]:
            return (m(x) - y - noise * y.std()).square().squeeze(1), None

        return model, score

    def test_the_site_that_hurts_is_kept(self) -> None:
        model, score = self.subject()
        summary = quantize(model, "rowwise", score=score, bound=4.0, metric="squared error")
        assert list(summary.kept) == ["1"]
        assert summary.record.change is not None
        assert summary.record.change.high <= 4.0
        alone = {site.name: site.metric_change for site in summary.record.sites}
        assert alone["1"].low > 4.0
        assert "the whole model must stay within 400%" in summary.kept["1"]

    def test_without_a_bound_everything_is_quantised_and_measured(self) -> None:
        model, score = self.subject()
        summary = quantize(model, "rowwise", score=score)
        assert summary.quantized == ["0", "1", "2"]
        assert summary.record.change.low > 4.0

    def test_a_bound_nothing_meets_keeps_everything(self) -> None:
        model, score = self.subject()
        plain = [module.weight for module in model]
        summary = quantize(model, "rowwise", score=score, bound=1e-9)
        assert summary.quantized == []
        assert summary.record.change.value == 0
        assert all(module.weight is weight for module, weight in zip(model, plain, strict=True))


def test_widening_adds_what_is_safe() -> None:
    model = make()
    history, codes = requests(model, 64)

    def score(m: nn.Module) -> tuple[torch.Tensor, None]:
        logits = m(history, codes)
        return torch.stack(
            [semantic_id_loss(tuple(level[i : i + 1] for level in logits), codes[i : i + 1]) for i in range(64)]
        ), None

    summary = quantize(model, score=score, bound=0.05, widen=True)
    assert "heads.0.linear" in summary.quantized
    assert summary.record.change.high <= 0.05


def chain_of(width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


class TestPlan:
    """`quantize` is `convert` with `freeze`: what a plan says runs, chains included, and what `convert` refuses is kept with its reason."""

    def test_a_plan_runs_as_convert_runs_it(self) -> None:
        x = torch.randn(64, 64)
        model, twin = chain_of().eval(), chain_of().eval()
        plan = loka.placing.plan_everything(model, x, serving=True)
        assert plan.units
        loka.convert(twin, plan, freeze=True)
        summary = quantize(model, plan)
        assert torch.equal(model(x), twin(x))
        assert set(plan.units[0].linears) <= set(summary.quantized)
        assert summary.record.plan == plan.seal.sha256
        assert all("in chain" in site.reason for site in summary.record.sites if site.name in plan.units[0].linears)

    def test_a_chain_without_scales_needs_batches_and_is_left_alone_without(self) -> None:
        x = torch.randn(64, 64)
        model = chain_of().eval()
        plan = loka.placing.plan_everything(model, x)
        before = model(x)
        with pytest.raises(ValueError, match="no scales"):
            quantize(model, plan)
        assert torch.equal(model(x), before)
        quantize(model, plan, batches=[x])
        assert 0 < (model(x) - before).norm() / before.norm() < 0.2

    def test_the_mods_of_a_plan_are_applied_and_undone_when_it_fails(self) -> None:
        x = torch.randn(64, 64)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)).eval()  # fmt: skip
        before, kinds = model(x), [type(m) for m in model]
        plan = loka.placing.plan_everything(model, x, mods=["no_bias", "block_norm"])
        with pytest.raises((ValueError, RuntimeError), match="63"):
            quantize(model, plan, batches=[x, torch.randn(64, 63)])
        assert [type(m) for m in model] == kinds
        assert torch.equal(model(x), before)
        quantize(model, plan, batches=[x])
        assert loka.mods.applied_to(model) == ("no_bias", "block_norm")
        assert model(x).isfinite().all()

    def test_fixed_scales_are_calibrated(self) -> None:
        x = torch.randn(64, 64)
        model = chain_of().eval()
        before = model(x)
        summary = quantize(model, "tensorwise", scales="static", batches=[x])
        assert summary.quantized == ["0", "2", "4"]
        assert all(site.activation == "e4m3:tensor:static" for site in summary.record.sites)
        assert 0 < (model(x) - before).norm() / before.norm() < 0.2

    def test_what_convert_refuses_is_kept_and_says_why(self) -> None:
        class Doubled(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x)

        model = nn.Sequential(
            nn.Linear(16, 16), Doubled(16, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 4))
        )
        summary = quantize(model, "rowwise")
        assert summary.quantized == ["0"]
        assert "forward of its own" in summary.kept["1"]
        assert "parametrised" in summary.kept["2"]

    def test_one_meaning_of_rowwise(self) -> None:
        model, twin = chain_of().eval(), chain_of().eval()
        x = torch.randn(64, 64)
        summary = quantize(model, "rowwise")
        loka.convert(twin, recipe="rowwise", freeze=True)
        assert torch.equal(model(x), twin(x))
        operands = loka.dispatch.RECIPES["rowwise"].fprop
        assert {(site.activation, site.weight, site.fast_accum) for site in summary.record.sites} == {
            (str(operands.a), str(operands.b), operands.fast_accum)
        }
        experts = make()
        quantize(experts, "rowwise", keep=("*.router",))
        assert str(experts.blocks[1].ffn.down.bound.b) == str(operands.b)


class TestFiles:
    def test_loads_without_the_original(self, tmp_path: Path) -> None:
        model = make()
        history, codes = requests(model)
        summary = quantize(model)
        save(model, summary, tmp_path / "q.safetensors", dtype=torch.float32)
        again, read = load_quantized(tmp_path / "q.safetensors")
        assert isinstance(again, OneRec)
        assert again.config == model.config
        assert read.record == summary.record
        for a, b in zip(model(history, codes), again(history, codes), strict=True):
            assert torch.equal(a, b)

    def test_the_file_is_as_small_as_the_record_says(self, tmp_path: Path) -> None:
        model = make("small", d_ff=1024, codebooks=(64, 64, 64))
        summary = quantize(model)
        save(model, summary, tmp_path / "q.safetensors")
        with safe_open(str(tmp_path / "q.safetensors"), framework="pt") as file:
            stored = sum(file.get_tensor(n).nbytes for n in file.keys())  # noqa: SIM118
        assert stored == summary.record.bytes_after
        assert summary.record.ratio < 0.6

    def test_a_users_model_loads_through_its_factory(self, tmp_path: Path) -> None:
        def factory() -> nn.Module:
            return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3))

        model, x = factory(), torch.randn(4, 20)
        summary = quantize(model, "rowwise")
        path = tmp_path / "q.safetensors"
        save(model, summary, path, dtype=torch.float32)
        again, _ = load_quantized(path, build=factory)
        assert torch.equal(again(x), model(x))
        with pytest.raises(ValueError, match="pass build="):
            load_quantized(path)
        with pytest.raises(ValueError, match="other sites"):
            load_quantized(path, build=lambda: nn.Sequential(nn.Linear(20, 30)))
        with pytest.raises(ValueError, match="weight of"):
            load_quantized(path, build=lambda: nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4)))

    def test_a_users_model_runs_in_its_own_type_again(self, tmp_path: Path) -> None:
        """The file has 16 bits where the model has 32; a norm of 16 bits would refuse what a linear of 32 hands on."""

        def factory() -> nn.Module:
            return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))

        model, x = factory(), torch.randn(4, 32)
        save(model, quantize(model, "rowwise"), tmp_path / "q.safetensors")
        again, _ = load_quantized(tmp_path / "q.safetensors", build=factory)
        assert again[1].weight.dtype == torch.float32
        assert float((again(x) - model(x)).norm() / model(x).norm()) < 0.01
        half, _ = load_quantized(tmp_path / "q.safetensors", build=lambda: factory().bfloat16())
        assert half(x.bfloat16()).dtype == torch.bfloat16

    def test_what_no_file_holds_is_made_again(self, tmp_path: Path) -> None:
        model = build("interformer", "tiny").eval()  # its rotary angles are a table
        save(model, quantize(model, "rowwise"), tmp_path / "q.safetensors", dtype=torch.float32)
        again, _ = load_quantized(tmp_path / "q.safetensors")
        inputs = torch.randn(2, 16, 16), torch.randn(2, 8, 16), torch.tensor([8, 3])
        torch.testing.assert_close(again(*inputs), model(*inputs), rtol=0, atol=0)

    @pytest.mark.parametrize("serving", [True, False])
    def test_a_frozen_chain_loads_as_it_ran(self, tmp_path: Path, serving: bool) -> None:
        x, path = torch.randn(64, 64), tmp_path / "q.safetensors"
        model = chain_of().eval()
        plan = loka.placing.plan_everything(model, x, serving=serving)
        summary = quantize(model, plan, batches=[x])
        save(model, summary, path, dtype=torch.float32)
        again, read = load_quantized(path, build=chain_of)
        assert torch.equal(again(x), model(x))
        assert torch.equal(again(x[:3] * 2), model(x[:3] * 2))
        assert read.record == summary.record
        assert read.record.units[0].linears == plan.units[0].linears
        with safe_open(str(path), framework="pt") as file:
            assert file.get_tensor("2.weight").dtype == torch.float8_e4m3fn
        save(model, summary, path)
        with safe_open(str(path), framework="pt") as file:
            stored = sum(file.get_tensor(n).nbytes for n in file.keys())  # noqa: SIM118
        assert stored == summary.record.bytes_after
        with pytest.raises(ValueError, match=r"0, 2: .*the originals are gone"):
            loka.revert(again)
        with pytest.raises(ValueError, match=r"q\.safetensors: unit 0 does not fit"):
            load_quantized(path, build=lambda: nn.Sequential(*[nn.GELU() if isinstance(m, nn.ReLU) else m for m in chain_of()]))  # fmt: skip
        with pytest.raises(ValueError, match="in a chain or with fixed scales, which this file cannot hold"):
            export_compressed_tensors(model, summary, tmp_path / "folder")
        assert not (tmp_path / "folder").exists()

    def test_a_chain_without_its_weights_is_refused(self, tmp_path: Path) -> None:
        x, path = torch.randn(64, 64), tmp_path / "q.safetensors"
        model = chain_of().eval()
        save(model, quantize(model, loka.placing.plan_everything(model, x, serving=True)), path)
        with safe_open(str(path), framework="pt") as file:
            tensors, header = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()  # noqa: SIM118
        del tensors["2.weight_scale"]
        save_file(tensors, path, metadata=header)
        with pytest.raises(ValueError, match=r"q\.safetensors: 2 is in a chain: expected an FP8 weight"):
            load_quantized(path, build=chain_of)

    def test_mods_must_be_there_again(self, tmp_path: Path) -> None:
        x, path = torch.randn(64, 64), tmp_path / "q.safetensors"
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 2)).eval()
        plan = loka.placing.plan_everything(model, x, mods=["hard_swish"])
        save(model, quantize(model, plan, batches=[x]), path)
        with pytest.raises(ValueError, match="was quantized with the mods hard_swish, the model has none"):
            load_quantized(path, build=lambda: nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 2)))  # fmt: skip

    def test_a_factory_may_apply_mods_and_make_buffers(self, tmp_path: Path) -> None:
        """Both need values, which a model without storage has not."""
        x, path = torch.randn(64, 64), tmp_path / "q.safetensors"

        class Scaled(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 2))
                self.register_buffer("factor", torch.tensor(3.0), persistent=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.factor * super().forward(x)

        def factory() -> nn.Module:
            model = Scaled().eval()
            loka.mods.apply(model, "narrow_outputs", example=x)
            return model

        torch.manual_seed(0)
        model = Scaled().eval()
        summary = quantize(model, loka.placing.plan_everything(model, x, mods=["narrow_outputs"]), batches=[x])
        assert "by a plan" in str(summary)
        save(model, summary, path, dtype=torch.float32)
        again, _ = load_quantized(path, build=factory)
        assert torch.equal(again(x), model(x))

    def test_fixed_scales_need_batches_that_the_model_takes(self) -> None:
        model, x = chain_of(), torch.randn(64, 64)
        before = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=r'scales="static" are fixed by batches, and none were given'):
            quantize(model, "tensorwise", scales="static")
        with pytest.raises(ValueError, match=r"cannot run the example: TypeError.*without a target"):
            quantize(model, "tensorwise", scales="static", batches=[(x, x)])
        with pytest.raises(TypeError):
            quantize(model, "tensorwise", scales="static", batches=[x, (x, x)])
        assert [type(m) for m in model.modules()] == before
        assert all(m.training for m in model.modules())

    def test_fixed_scales_are_not_saved(self, tmp_path: Path) -> None:
        model = chain_of().eval()
        summary = quantize(model, "tensorwise", scales="static", batches=[torch.randn(64, 64)])
        with pytest.raises(ValueError, match=r"0, 2, 4: runs with fixed scales.*keep the plan"):
            save(model, summary, tmp_path / "never.safetensors")

    def test_what_was_packed_is_not_reverted(self) -> None:
        model = chain_of().eval()
        quantize(model, "rowwise")
        before = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=r"0, 2, 4: loka\.quantize kept only FP8 weights.*load the original"):
            loka.revert(model)
        assert [type(m) for m in model.modules()] == before

    def test_damage_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "broken.safetensors"
        path.write_bytes(b"not a file")
        with pytest.raises(ValueError, match=r"broken\.safetensors"):
            load_quantized(path)


class TestExport:
    def test_every_tensor_has_its_place(self, tmp_path: Path) -> None:
        model = make()
        summary = quantize(model)
        export_compressed_tensors(model, summary, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        groups = {g["weights"]["strategy"]: g for g in config["config_groups"].values()}
        assert groups["channel"]["input_activations"]["strategy"] == "token"
        assert groups["block"]["weights"]["block_structure"] == [128, 128]
        assert "blocks.1.ffn.down.3" in groups["block"]["targets"]
        assert "heads.0.linear" in config["ignore"]
        with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
            names = set(file.keys())
            for group in config["config_groups"].values():
                for target in group["targets"]:
                    assert file.get_tensor(f"{target}.weight").dtype == torch.float8_e4m3fn
                    assert f"{target}.weight_scale" in names
            one = file.get_tensor("blocks.1.ffn.down.3.weight")
        assert torch.equal(one.view(torch.uint8), model.get_submodule("blocks.1.ffn.down").codes[3].view(torch.uint8))

    def test_what_cannot_be_said_is_refused(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        summary = quantize(model, "tensorwise")
        with pytest.raises(ValueError, match="no spelling"):
            quantization_config(model, summary)


class _Reads(nn.Module):
    """Weights that a forward reads: one without a call of its linear, one besides it."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_by, self.read, self.called, self.head = (nn.Linear(64, n) for n in (64, 64, 64, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.passed_by.weight.to(x.dtype), self.passed_by.bias).relu()
        return self.head(self.called(h).relu() + self.read(h)) + self.read.weight.float().square().sum()


@pytest.mark.parametrize("recipe", ["rowwise", "plan"])
def test_weights_that_the_model_reads_stay(recipe: str) -> None:
    """Where nothing is to be calibrated, a batch still shows what is read: 8-bit values without their scale are wrong."""
    torch.manual_seed(0)
    model, x = _Reads().eval(), torch.randn(32, 64)
    exact = model(x)
    plan = _plan_with_linears(model) if recipe == "plan" else recipe
    summary = loka.quantize(model, plan, batches=[x])
    assert (model(x) - exact).norm() < 0.1 * exact.norm()
    assert {type(model.passed_by), type(model.read)} == {nn.Linear}
    assert isinstance(model.called, QuantizedLinear)
    assert set(summary.kept) >= {"passed_by", "read"}
    assert "its weight is read elsewhere too" in summary.kept["read"]
    assert summary.record.recipe == ("auto" if recipe == "plan" else recipe)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_no_batch_showed_to_be_read_is_read_with_its_scale(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = _Reads().to(dtype).eval(), torch.randn(32, 64, dtype=dtype)
    exact = model(x)
    loka.quantize(model, recipe, backend="reference")
    assert isinstance(model.passed_by, QuantizedLinear)
    assert (model(x) - exact).norm() < 0.1 * exact.norm()
    copied, again = copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(copied(x), model(x))
    assert torch.equal(again(x), model(x))
    held = {"passed_by.weight": model.passed_by.codes, "passed_by.weight_scale": 2 * model.passed_by.weight_scale}
    assert not torch.equal(torch.func.functional_call(model, held, (x,)), model(x))


def _double(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
    return output * module.factor + module.offset


def _hooked() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    model[0].factor = 2.0
    model[0].register_buffer("offset", torch.ones(64))
    model[0].register_buffer("rate", torch.ones(()), persistent=False)
    model[0].register_forward_hook(_double, with_kwargs=True)
    return model


@pytest.mark.parametrize("scales", ["dynamic", "static"])
def test_hooks_of_a_linear_run_on(scales: str, tmp_path: Path) -> None:
    """They see what the linear had besides its weight, and their handles remove them."""
    model, x = _hooked(), torch.randn(32, 64)
    handle = model[2].register_forward_pre_hook(lambda module, args: (-args[0],))
    exact, keys = model(x), {*model.state_dict()}
    summary = loka.quantize(model, "tensorwise", scales=scales, batches=[x], backend="reference")
    assert (model(x) - exact).norm() < 0.1 * exact.norm()
    assert {*model.state_dict()} - keys <= {"0.weight_scale", "2.weight_scale"}
    assert keys <= {*model.state_dict()}
    turned = model(x)
    handle.remove()
    bias = model[2].bias
    torch.testing.assert_close(model(x) - bias, bias - turned)
    if scales == "dynamic":
        save(model, summary, tmp_path / "model.safetensors", dtype=torch.float32)
        loaded, _ = load_quantized(tmp_path / "model.safetensors", build=_hooked, backend="reference")
        assert torch.equal(loaded(x), model(x))
        assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_pruned_bias_is_still_made_by_its_hook() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(32, 64)
    prune.l1_unstructured(model[0], "bias", amount=0.5)
    exact, keys = model(x), {*model.state_dict()}
    summary = loka.quantize(model, "tensorwise", backend="reference")
    assert not summary.kept
    assert (model(x) - exact).norm() < 0.1 * exact.norm()
    assert {*model.state_dict()} == keys | {"0.weight_scale", "2.weight_scale"}


def _plan_with_linears(model: nn.Module) -> Plan:
    """Every linear by the recipe rowwise, also those that a report would keep."""
    choices = [choice_of(gemm, recipe_named("rowwise").operands(gemm), "asked for") for gemm in GEMMS]
    sites = [SitePlan(n, 32, m.in_features, m.out_features, 0.25, choices) for n, m in model.named_children()]
    return msgspec.structs.replace(plan_everything(model, torch.randn(32, 64)), sites=sites, units=[])


def test_no_line_of_a_summary_is_wider_than_a_terminal() -> None:
    """The note on the kernels that refused would be one line of hundreds of letters."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    lines = str(quantize(model, "rowwise", keep=["2"])).splitlines()
    assert any(line.startswith("  note: auto is ") for line in lines)
    assert any(line.startswith("  kept 2: ") for line in lines)
    assert max(map(len, lines)) <= 120
