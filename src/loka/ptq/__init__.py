"""ptq: quantize a trained model for serving, and analyze its distributions to see whether FP8 suits it.

summary = loka.quantize(model, "rowwise")                     in place, by a recipe or a plan
loka.ptq.save(model, summary, "model.safetensors")            loka.ptq.load_quantized(path) needs no original weights
loka.ptq.export_compressed_tensors(model, summary, "folder")  for engines that read this layout

quantizing.py     `loka.quantize`
deciding.py       which sites are quantized and how: by rules, then within a measured bound
modules.py        linears and experts that hold only FP8 weights
checkpoint.py     save and load a quantized model; chains.py its chains; export.py the compressed-tensors layout
distribution.py   weights and activations, layer by layer: like a language model's, or like a ranker's
"""

from loka.ptq.checkpoint import load_quantized, save
from loka.ptq.distribution import REFERENCES, analyze_checkpoint, analyze_model
from loka.ptq.export import export_compressed_tensors, quantization_config
from loka.ptq.modules import QuantizedExperts, QuantizedLinear
from loka.ptq.quantizing import Summary, quantize, size_in_bytes

__all__ = [
    "REFERENCES", "QuantizedExperts", "QuantizedLinear", "Summary", "analyze_checkpoint", "analyze_model",
    "export_compressed_tensors", "load_quantized", "quantization_config", "quantize", "save",
    "size_in_bytes",
]  # fmt: skip
