"""The page of distributions: weights and activations of three trained models, beside what was published of such models."""

from typing import Any

from tables.results import read, table

RECORD = "cpu/distributions.json"
TEXT = """# Distributions of trained models

The second paper's argument for FP8 in generative recommenders is a picture: weights of a traditional ranker have variances up to about 1e7 and values over 1,000, those of OneRec-V2 and of language models stay below
a variance of 0.1. Here are three models that were trained for it, layer by layer. `loka analyze` makes the same table of any trained run or checkpoint; a model that nobody trained gets no verdict.

![Variance, largest magnitude, 99th percentile and range inside a row, by layer](figures/distributions.svg)

"""
COMPARED = """## Beside the published analysis

* **OneRec is like the language model**, in weights and in activations, as published: no weight variance near 0.1, no activation that loses a percent under one scale for each token. The widest range is what enters
  the last linear of its FFNs, a product of two things.
* **The ranker's weights are not what is wide here.** Nothing like 1e7 or 1,000 came out of {steps} at four times the usual learning rate; its linears have heavier tails (kurtosis {kurtosis:.0f}), and the largest
  variance is that of an embedding table, which began at 1. Production rankers train for months on tables that grow; that we cannot repeat.
* **Its activations are**: up to {absmax:,.0f}, because dollars enter as dollars, and the linears behind hand that on. Magnitude alone is harmless to a scaled format: what counts is the range under one scale. With one
  scale for the tensor {lost:.0%} of the first linear's input becomes zero, with one for each row {row:.1%}. That is where a plan keeps a site in 16 bits, and where [naive FP8 fails](concepts/naive.md).

Small models, trained for minutes on two busy cores: {machine}. `{command}`; the record is `benchmarks/results/{record}`.
"""


def distributions_page() -> str | None:
    """The whole page; None without a record."""
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
    return f"{TEXT}{table(head, rows)}\n\nWhat was trained, and what it reached:\n\n{trained}\n\n{compared}"


def _row(model: dict[str, Any], kind: str) -> list[str]:
    layers = [layer for layer in model["layers"] if layer["kind"] == kind]

    def spell(field: str) -> str:
        low, high = (f(layers, key=lambda layer: layer[field]) for f in (min, max))
        return f"{low[field]:.2g} to {high[field]:.3g} (`{high['name']}`)"

    crest = max((group["crest_bits"], layer["name"]) for layer in layers for group in layer["groups"] if group["spec"] == "e4m3:row")  # fmt: skip
    what = "weights" if kind == "weight" else "activations"
    return [model["name"], what, str(len(layers)), spell("variance"), spell("absmax"), spell("abs_p99"), f"up to {crest[0]:.1f} (`{crest[1]}`)", model["likeness"] if kind == "weight" else ""]  # fmt: skip
