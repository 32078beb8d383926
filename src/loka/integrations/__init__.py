"""integrations: run `loka.tune` inside another framework's training loop, in place, guarded afterwards.

    tuning = loka.integrations.TuneDuringTraining(batches, after=1000, step=..., out="runs/tuned")
    trainer.add_callback(loka.integrations.hf_callback(tuning))                  Hugging Face Trainer
    L.Trainer(callbacks=[loka.integrations.lightning_callback(tuning)])          Lightning
    tuning.begin_step(model); ...; tuning.end_step(model)                        any other loop, also TorchRec pipelines

during.py      the core, independent of frameworks
callbacks.py   the two callbacks around it; their libraries are imported when a callback is created
"""

from loka.integrations.callbacks import hf_callback, lightning_callback
from loka.integrations.during import TuneDuringTraining

__all__ = ["TuneDuringTraining", "hf_callback", "lightning_callback"]
