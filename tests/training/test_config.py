import json

import pytest

from loka.training import TrainConfig


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("accumulate", 0),
        ("precision", "fp16"),
        ("compile", "maybe"),
        ("schedule", "exponential"),
        ("learning_rate", 0.0),
        ("clip_norm", -1.0),
        ("betas", (0.9, 1.0)),
        ("final_fraction", 1.5),
        ("keep", 0),
        ("patience", 0),
        ("max_bad_batches", -1),
    ],
)
def test_bad_settings_are_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=setting):
        TrainConfig(**{setting: value})


def test_patience_needs_evaluations():
    with pytest.raises(ValueError, match="evaluate_every"):
        TrainConfig(patience=2)


def test_warmup_cannot_exceed_the_run():
    with pytest.raises(ValueError, match="warmup_steps"):
        TrainConfig(steps=10, warmup_steps=11)


def test_json_round_trip():
    config = TrainConfig(steps=7, betas=(0.8, 0.9), clip_norm=1.5, evaluate_every=2, patience=3)
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_unknown_setting_in_json_is_refused():
    with pytest.raises(ValueError, match="stepps"):
        TrainConfig.from_json({"stepps": 3})


def test_changes_since_ignores_watching_and_names_the_rest():
    stored = TrainConfig(steps=10)
    assert TrainConfig(steps=10, log_every=1, keep=5).changes_since(stored) == []
    assert TrainConfig(steps=20).changes_since(stored) == []
    assert TrainConfig(steps=10, learning_rate=0.5).changes_since(stored) == ["learning_rate: 0.001 -> 0.5"]


def test_more_steps_are_a_change_when_the_schedule_spreads_over_them():
    stored = TrainConfig(steps=10, schedule="cosine")
    assert TrainConfig(steps=20, schedule="cosine").changes_since(stored) == ["steps: 10 -> 20"]
