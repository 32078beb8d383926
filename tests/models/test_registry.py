import pytest
import torch

from loka import models
from loka.models.registry import FAMILIES


@pytest.mark.parametrize("family", models.names())
def test_every_size_of_every_family_is_built_and_counted_without_being_allocated(family):
    for size in models.sizes(family):
        with torch.device("meta"):
            model = models.build(family, size)
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    for size in models.sizes(family)[:3]:
        cost = models.count(models.configure(family, size))
        assert cost.flops_forward > cost.active_parameters, "every weight is multiplied and added at least once"
        assert 0 < cost.active_parameters <= cost.parameters


@pytest.mark.parametrize("family", models.names())
def test_every_family_has_a_tiny_size_and_its_config_builds_it(family):
    config = models.configure(family, "tiny")
    model = models.build(config)
    assert type(model) is FAMILIES[family].model
    assert model.config == config
    assert sum(p.numel() for p in model.parameters()) < 300_000


@pytest.mark.parametrize("family", models.names())
def test_every_matrix_product_weight_belongs_to_a_swappable_module(family):
    """No naked parameters of two dimensions or more, except where the module says in one word what it is."""
    allowed = {"Linear", "Embedding", "FeatureMix", "GroupedLinear", "RelativeBias", "Seeds"}
    for name, module in models.build(family, "tiny").named_modules():
        for parameter, value in module.named_parameters(recurse=False):
            assert value.dim() < 2 or type(module).__name__ in allowed, f"{name}.{parameter}"


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"'nope'.*wukong"):
        models.build("nope")
    with pytest.raises(ValueError, match=r"wukong has no size 'huge'.*tiny"):
        models.build("wukong", "huge")
    with pytest.raises(ValueError, match=r"no option 'lr'.*layers"):
        models.build("wukong", "tiny", lr=1)
    with pytest.raises(ValueError, match="configured by int"):
        models.build(3)


def test_style_switches_and_fields_are_both_overrides():
    config = models.configure("wukong", "tiny", n=9, norm="rms", bias=False)
    assert (config.n, config.style.norm, config.style.bias, config.style.activation) == (9, "rms", False, "relu")


def test_count_of_a_model_is_the_count_of_its_config():
    model = models.build("dlrm", "tiny")
    assert models.count(model) == models.count(model.config)
    assert models.count(model).parameters == sum(p.numel() for p in model.parameters())
    assert all(p.device == torch.device("cpu") for p in model.parameters())
