"""integrations: `loka.tune` inside other people's training loops, at a step, in place, watched by Guard afterwards.

    tuning = loka.integrations.TuneDuringTraining(batches, after=1000, step=..., out="runs/tuned")
    trainer.add_callback(loka.integrations.hf_callback(tuning))                  Hugging Face Trainer
    L.Trainer(callbacks=[loka.integrations.lightning_callback(tuning)])          Lightning
    tuning.begin_step(model); ...; tuning.end_step(model)                        any other loop, TorchRec's pipelines included

during.py      the core, which knows no framework
callbacks.py   the two callbacks around it; their libraries are imported when one is made
"""

from loka.integrations.callbacks import hf_callback, lightning_callback
from loka.integrations.during import TuneDuringTraining

__all__ = ["TuneDuringTraining", "hf_callback", "lightning_callback"]
