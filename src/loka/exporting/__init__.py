"""Export a frozen model to one file that runs without loka.

    loka.export(model, example, "ranker.pt2")                    an AOTInductor package: compiled code, loaded by torch
                                                                 alone from Python or C++
    loka.export(model, example, "ranker.onnx", format="onnx")    ONNX with QuantizeLinear / DequantizeLinear nodes

signature.py    flattens a model's arguments to named tensors, which is all that such a file can take
plain.py        replaces converted modules by plain torch ops
ops.py          the cast and the GEMM of these modules, for each format
package.py      traces, writes, loads the file again and compares it with the model
trying.py       runs a package in its own process

To translate a plan for another library (torchao, ModelOpt, ...) use `loka.dispatch.export` or `loka translate`.
"""

from loka.exporting.package import Exported, export

__all__ = ["Exported", "export"]
