"""The page of distributions: weights and activations of three trained models, compared with published ones."""

from typing import Any

from tables.results import read, table

RECORD = "cpu/distributions.json"
TEXT = """# Distributions of trained models

The second paper argues for FP8 in generative recommenders with a plot of distributions: weights of a traditional ranker have variances up to about 1e7 and values over 1,000, while those of OneRec-V2 and of language models stay below a variance of 0.1.
This page shows three models that we trained for the comparison, layer by layer. `loka analyze` makes the same table for any trained run or checkpoint; an untrained model gets no verdict.

![Variance, largest magnitude, 99th percentile and range inside a row, by layer](figures/distributions.svg)

"""
COMPARED = """## Compared with the published analysis

* **OneRec resembles the language model**, in weights and in activations, as published. No weight variance is near 0.1, and with one scale per token no activation loses a percent. The input of the last linear of its FFNs, which is a
  product of two tensors, has the widest range.
* **The ranker's weights do not have a wide range here.** {steps} at four times the usual learning rate led to nothing like 1e7 or 1,000. Its linears have heavier tails (kurtosis {kurtosis:.0f}). The largest variance is that of an
  embedding table, whose initial variance is 1. Production rankers train for months on growing tables, which we cannot repeat.
* **The ranker's activations do**: up to {absmax:,.0f}, because dollar amounts are raw inputs, and the linears pass them on. Magnitude alone does not matter to a scaled format; the range under one scale does. With one scale for the
  tensor, {lost:.0%} of the first linear's input becomes zero; with one per row, {row:.1%}. At such sites [naive FP8 fails](concepts/naive.md) and a plan keeps 16-bit precision.

These are small models, trained for minutes on two busy cores: {machine}. `{command}`; the record is `benchmarks/results/{record}`.
"""


def distributions_page() -> str | None:
    """Return the whole page, or None without a record."""
    found = read(RECORD)
    if found is None:
        return None
    rows = [_row(model, kind) for model in found["models"] for kind in ("weight", "activation")]
    head = ["model", "what", "layers", "variance", "AbsMax", "AbsP99", "crest inside a row, bits", "verdict"]
    trained = "\n".join(f"* {model['name']}: {model['source']}; activations of {model['activations_of']}" for model in found["models"])  # fmt: skip
    ranker = next(model for model in found["models"] if model["name"].startswith("ranker"))
    first = next(layer for layer in ranker["layers"] if layer["kind"] == "activation")
    lost = {group["spec"]: group["underflow"] for group in first["groups"]}
    at = found["environment"]
    compared = COMPARED.format(
        steps=ranker["source"].split(",")[0], kurtosis=max(x["kurtosis"] for x in ranker["layers"] if x["kind"] == "weight"), absmax=first["absmax"], lost=lost["e4m3:tensor"], row=lost["e4m3:row"],
        machine=f"{at['date'][:10]}, {at['cpu']}, torch {at['torch']}", command=f"python benchmarks/{at['command']}", record=RECORD,
    )  # fmt: skip
    return f"{TEXT}{table(head, rows)}\n\nThe trained models and their quality:\n\n{trained}\n\n{compared}"


def _row(model: dict[str, Any], kind: str) -> list[str]:
    layers = [layer for layer in model["layers"] if layer["kind"] == kind]

    def spell(field: str) -> str:
        low, high = (f(layers, key=lambda layer: layer[field]) for f in (min, max))
        return f"{low[field]:.2g} to {high[field]:.3g} (`{high['name']}`)"

    crest = max((group["crest_bits"], layer["name"]) for layer in layers for group in layer["groups"] if group["spec"] == "e4m3:row")  # fmt: skip
    what = "weights" if kind == "weight" else "activations"
    return [model["name"], what, str(len(layers)), spell("variance"), spell("absmax"), spell("abs_p99"), f"up to {crest[0]:.1f} (`{crest[1]}`)", model["likeness"] if kind == "weight" else ""]  # fmt: skip
