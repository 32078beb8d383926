import math

import pytest
import torch
from torch.nn import functional as F

from loka.training import (
    Callback,
    NonFiniteLossError,
    TrainConfig,
    Trainer,
    find_checkpoints,
    learning_rate_factor,
    load_weights,
    ranking_loss,
    read_best,
    seed_everything,
)
from loka.training.optimizers import build_adam

from .toy import ToyData, assert_same_bits, make_data, make_model, weights_of

FAST = {"steps": 20, "batch_size": 50, "device": "cpu", "log_every": 5}


def train(model=None, data=None, **settings):
    keywords = {name: settings.pop(name) for name in ("callbacks", "out", "loss_fn", "evaluate_fn") if name in settings}
    model = make_model() if model is None else model
    trainer = Trainer(model, data or make_data(), TrainConfig(**{**FAST, **settings}), **keywords)
    return trainer, trainer.fit()


def test_learning_lowers_loss_and_ne():
    data = make_data(2000)
    before = Trainer(make_model(), data, TrainConfig(device="cpu")).evaluate()
    trainer, result = train(data=data, steps=150, learning_rate=1e-2, evaluate_every=50)
    assert before["ne"] > 0.97
    assert result.metrics["ne"] < 0.85
    assert result.metrics["auc"] > 0.75
    assert result.metrics["loss"] == pytest.approx(result.metrics["log_loss"], rel=1e-5)
    assert result.examples == 150 * 50
    assert result.best["step"] in (50, 100, 150)
    assert trainer.step == result.steps == 150


def test_the_loop_is_what_it_says_against_a_plain_loop():
    """Same batches, same optimisers, written out by hand."""
    config = TrainConfig(**FAST, accumulate=2, clip_norm=0.1, schedule="cosine", warmup_steps=5)
    data, model = make_data(), make_model()
    Trainer(model, data, config).fit()

    plain = make_model()
    seed_everything(0)
    adam = build_adam(list(plain.core.parameters()), config)
    history = torch.zeros(50)
    stream = [
        batch
        for epoch in range(8)
        for batch in data.train.batches(50, shuffle=True, seed=0, drop_last=True, epoch=epoch)
    ]
    for step in range(20):
        factor = learning_rate_factor(config, step)
        plain.zero_grad()
        for batch in stream[2 * step : 2 * step + 2]:
            (F.binary_cross_entropy_with_logits(plain(batch), batch.labels) / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.core.parameters(), 0.1)
        for group in adam.param_groups:
            group["lr"] = 1e-3 * factor
        adam.step()
        gradient = plain.table.weight.grad.to_dense()
        history += gradient.square().mean(dim=1)
        with torch.no_grad():
            plain.table.weight -= 2e-2 * factor * gradient / (history.sqrt() + 1e-8).unsqueeze(1)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_seed_fixes_the_bits_and_another_seed_changes_them():
    runs = [weights_of(train(seed=seed)[0].module) for seed in (1, 1, 2)]
    assert_same_bits(runs[0], runs[1])
    assert not torch.equal(runs[0]["core.0.weight"], runs[2]["core.0.weight"])


def test_accumulation_equals_one_large_batch():
    def loss_without_noise(model, batch):
        return ranking_loss(model.eval(), batch)

    class Fixed:
        """The same four hundred examples in order, whatever the batch size."""

        def __init__(self, whole):
            self.whole = whole

        def batches(self, batch_size, *, shuffle, **settings):
            return self.whole.batches(batch_size, shuffle=False, **settings)

    data = ToyData(Fixed(make_data().train), None)
    models = [make_model(dropout=0.0) for _ in range(2)]
    train(models[0], data, loss_fn=loss_without_noise, steps=3, batch_size=100)
    train(models[1], data, loss_fn=loss_without_noise, steps=3, batch_size=25, accumulate=4)
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_several_labels_get_metrics_each():
    _, result = train(make_model(2), make_data(labels=2), evaluate_every=10)
    assert {"ne", "ne/0", "ne/1", "auc/0", "auc/1"} <= result.metrics.keys()
    assert result.metrics["ne"] == pytest.approx((result.metrics["ne/0"] + result.metrics["ne/1"]) / 2)


def test_a_loss_function_of_the_users_own():
    def squared(model, batch):
        return (model(batch) - batch.labels).square().mean(), None

    _, result = train(loss_fn=squared, evaluate_every=10, monitor="loss")
    assert set(result.metrics) == {"loss"}
    with pytest.raises(ValueError, match="monitor 'ne'"):
        train(loss_fn=squared, evaluate_every=10)
    with pytest.raises(ValueError, match="scalar"):
        train(loss_fn=lambda model, batch: (model(batch), None))


def test_an_evaluation_of_the_users_own():
    seen = []

    def count(model):
        seen.append(model)
        return {"hr@10": 0.1 * len(seen)}

    trainer, result = train(evaluate_fn=count, evaluate_every=5, monitor="hr@10")
    assert result.best == {"step": 20, "metric": "hr@10", "value": pytest.approx(0.4)}
    assert seen == [trainer.module] * 4


def test_bf16_keeps_float32_weights_and_still_learns():
    trainer, result = train(data=make_data(2000), steps=100, learning_rate=1e-2, precision="bf16", evaluate_every=100)
    assert {parameter.dtype for parameter in trainer.module.parameters()} == {torch.float32}
    assert result.metrics["ne"] < 0.9
    assert result.precision == "bf16"


def test_early_stop_keeps_and_restores_the_best(tmp_path):
    values = iter([0.9, 0.7, 0.8, 0.75, 0.1])
    kept = {}

    class Watch(Callback):
        def on_evaluate(self, trainer, metrics):
            kept[trainer.step] = weights_of(trainer.module)

    trainer, result = train(
        evaluate_fn=lambda model: {"ne": next(values)},
        evaluate_every=2,
        patience=2,
        keep=1,
        out=tmp_path,
        callbacks=[Watch()],
    )
    assert result.stopped_early
    assert (result.steps, result.best["step"]) == (8, 4)
    assert [path.name for path in find_checkpoints(tmp_path / "checkpoints")] == ["step-00000004", "step-00000008"]
    assert_same_bits(weights_of(trainer.module), kept[8])
    trainer.load_best()
    assert_same_bits(weights_of(trainer.module), kept[4])
    other = make_model(seed=9)
    assert load_weights(other, read_best(tmp_path / "checkpoints")) == 4
    assert_same_bits(weights_of(other), kept[4])


def test_best_weights_in_memory_without_a_folder():
    values, kept = iter([0.7, 0.8]), {}

    class Watch(Callback):
        def on_evaluate(self, trainer, metrics):
            kept[trainer.step] = weights_of(trainer.module)

    trainer, _ = train(evaluate_fn=lambda model: {"ne": next(values)}, evaluate_every=10, callbacks=[Watch()])
    trainer.load_best()
    assert_same_bits(weights_of(trainer.module), kept[10])


def test_load_best_without_an_evaluation_is_an_error():
    trainer, _ = train()
    with pytest.raises(ValueError, match="no best"):
        trainer.load_best()


def poison(at):
    """A loss that is NaN for the given calls."""
    calls = iter(range(10_000))

    def loss_fn(model, batch):
        loss, logits = ranking_loss(model, batch)
        return (loss * math.nan if next(calls) in at else loss), logits

    return loss_fn


def test_a_bad_loss_names_step_and_batch_and_keeps_the_last_checkpoint(tmp_path):
    model = make_model()
    with pytest.raises(NonFiniteLossError, match=r"step 6, batch 13 .*Last good checkpoint: step 6"):
        train(model, loss_fn=poison({13}), accumulate=2, checkpoint_every=2, keep=9, out=tmp_path, log_every=4)
    assert [path.name[-2:] for path in find_checkpoints(tmp_path / "checkpoints")] == ["02", "04", "06"]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_bad_batches_are_skipped_counted_and_limited():
    _, result = train(loss_fn=poison({3, 7}), max_bad_batches=2)
    assert (result.bad_batches, result.steps, result.examples) == (2, 20, 1000)
    with pytest.raises(NonFiniteLossError, match="batch 9"):
        train(loss_fn=poison({3, 7, 9}), max_bad_batches=2)


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    class Break(Callback):
        def on_step_end(self, trainer, log):
            if trainer.step == 4:
                with torch.no_grad():
                    trainer.module.core[0].weight[0, 0] = math.inf

    with pytest.raises(NonFiniteLossError, match=r"core\.0\.weight"):
        train(callbacks=[Break()], checkpoint_every=2, out=tmp_path)
    assert [path.name[-2:] for path in find_checkpoints(tmp_path / "checkpoints")] == ["02"]


def test_checkpoints_need_a_folder_and_never_mix_two_runs(tmp_path):
    with pytest.raises(ValueError, match="out="):
        train(checkpoint_every=2)
    train(out=tmp_path)
    with pytest.raises(ValueError, match="already holds step-00000020"):
        train(out=tmp_path)


def test_what_the_machine_cannot_do_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="tf32"):
        train(precision="tf32")


def test_evaluating_without_a_split_is_an_error():
    with pytest.raises(ValueError, match="no valid split"):
        train(data=ToyData(make_data().train, None), evaluate_every=5)


def test_speed_excludes_evaluations():
    import time

    def slow(model):
        time.sleep(0.2)
        return {"ne": 1.0}

    start = time.perf_counter()
    _, result = train(evaluate_fn=slow, evaluate_every=5, log_every=10)
    wall = time.perf_counter() - start
    assert result.seconds <= wall - 0.8  # four evaluations slept 0.8 s; on a busy machine both are longer
    assert result.examples_per_s == pytest.approx(result.examples / result.seconds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("compile_", ["off", "on"])
def test_a_gpu_run_learns_saves_and_resumes(tmp_path, precision, compile_):
    settings = {"device": "cuda", "precision": precision, "compile": compile_, "learning_rate": 1e-2}
    settings.update(evaluate_every=50, checkpoint_every=25)
    data = make_data(2000)
    _, first = train(data=data, steps=100, out=tmp_path, **settings)
    assert first.metrics["ne"] < 0.9
    assert first.compile.enabled == (compile_ == "on")
    longer = Trainer(make_model(), data, TrainConfig(**{**FAST, **settings, "steps": 150}), out=tmp_path)
    second = longer.fit(resume=True)
    assert (second.resumed_from, second.steps) == (100, 150)
    assert second.metrics["ne"] < 0.9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_bad_loss_on_a_gpu_is_noticed_at_the_log_line_with_its_own_step(tmp_path):
    with pytest.raises(NonFiniteLossError, match="step 6, batch 6 "):
        train(loss_fn=poison({6}), device="cuda", checkpoint_every=4, keep=9, out=tmp_path, log_every=10)
    assert [path.name[-2:] for path in find_checkpoints(tmp_path / "checkpoints")] == ["04"]
