"""exporting: a frozen ranker as one file that runs without this library.

    loka.export(model, example, "ranker.pt2")                      an AOTInductor package: compiled code, loaded by torch alone, from Python or C++
    loka.export(model, example, "ranker.onnx", format="onnx")      ONNX with QuantizeLinear / DequantizeLinear around every product

signature.py    a model's arguments as a flat list of named tensors, which is all that such a file can take
plain.py        converted modules written out in operations that every torch has
package.py      traced, written, loaded again and compared with the model before the file is where it was asked for

This is about models. A plan in the words of another library (torchao, ModelOpt, ...) is `loka.dispatch.export` and `loka translate`.
"""

from loka.exporting.package import Exported, export

__all__ = ["Exported", "export"]
