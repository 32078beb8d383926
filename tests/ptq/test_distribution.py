"""Statistics are those of the tensors, groups show what hurts, verdicts follow the published sizes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from loka.formats import Spec
from loka.models import build
from loka.ptq import REFERENCES, analyze_checkpoint, analyze_model, quantize, save
from loka.ptq.distribution import analyze_tensor, measure_groups
from loka.records import Analysis, capture_environment, from_json, to_json


def test_moments_of_a_known_tensor() -> None:
    x = 0.5 * torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    found = analyze_tensor("w", "weight", x)
    assert found.variance == pytest.approx(float(x.var(correction=0)), rel=1e-6)
    assert found.absmax == float(x.abs().max())
    assert found.abs_p99 == pytest.approx(float(x.abs().flatten().kthvalue(int(0.99 * x.numel())).values), rel=0.1)
    assert abs(found.kurtosis) < 0.1
    assert found.elements == x.numel()


def test_size_alone_does_not_hurt_but_range_inside_a_group_does() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    plain, large = (measure_groups(t, Spec.parse("e4m3:row")) for t in (x, 1e6 * x))
    assert large.crest_bits == pytest.approx(plain.crest_bits, abs=1e-4)
    assert large.underflow == pytest.approx(plain.underflow, abs=1e-6)
    wide = x.clone()
    wide[:, 3] = 1e7
    row, block = (measure_groups(wide, Spec.parse(s)) for s in ("e4m3:row", "e4m3:1x128"))
    assert row.crest_bits > plain.crest_bits + 1
    assert row.underflow > 0.9
    assert 0.4 < block.underflow < 0.6  # only the half that shares a scale with the column


def test_crest_of_blocks_by_hand() -> None:
    x = torch.ones(4, 8)
    x[0, 0] = 4.0
    found = measure_groups(x, Spec.parse("e4m3:tensor"))
    rms = ((31 + 16) / 32) ** 0.5
    assert found.crest_bits == pytest.approx(torch.log2(torch.tensor(4 / rms)).item(), rel=1e-5)


def test_verdicts() -> None:
    torch.manual_seed(0)
    model = build("onerec", "tiny")
    with torch.no_grad():  # tables and positions of a trained size
        for p in model.parameters():
            p.mul_(0.2)
    assert analyze_model(model, name="small", source="code").likeness == "LLM-like"
    assert analyze_model(model, name="small", source="code", trained=False).likeness == "untrained"
    with torch.no_grad():
        model.blocks[0].cross.query.weight.mul_(1e4)
    found = analyze_model(model, name="large", source="code")
    assert found.likeness == "ranker-like"
    assert "blocks.0.cross.query" in found.reasons[0]
    assert "activations were not looked at" in found.reasons


def test_activations_that_die_under_their_scale_are_told() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.1)
    x = torch.randn(64, 8)
    x[:, 0] *= 1e6
    found = analyze_model(model, name="m", source="code", run=lambda m: m(x), activations_of="x")
    assert [layer.name for layer in found.layers if layer.kind == "activation"] == ["0", "1"]
    assert found.likeness == "between"
    assert any("lose activations to zero" in reason for reason in found.reasons)


def test_checkpoints_plain_and_quantised(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build("onerec", "tiny-moe").eval()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "plain.safetensors")
    summary = quantize(model)
    save(model, summary, tmp_path / "q.safetensors", dtype=torch.float32)
    a, b = (analyze_checkpoint(tmp_path / f"{n}.safetensors") for n in ("plain", "q"))
    first, second = ({layer.name: layer for layer in x.layers} for x in (a, b))
    assert first.keys() == second.keys()
    for name, layer in first.items():
        assert second[name].variance == pytest.approx(layer.variance, rel=0.02)
        assert second[name].absmax == pytest.approx(layer.absmax, rel=0.04)
    save_file({"x": torch.zeros(3)}, tmp_path / "empty.safetensors")
    with pytest.raises(ValueError, match="no floating-point matrix"):
        analyze_checkpoint(tmp_path / "empty.safetensors")


def test_the_record_survives() -> None:
    torch.manual_seed(0)
    models = [analyze_model(build("onerec", "tiny"), name="a", source="code")]
    record = Analysis(models=models, references=REFERENCES, environment=capture_environment())
    assert from_json(to_json(record), Analysis) == record
