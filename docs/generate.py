"""Pages and tables that are made from the code and from committed results, so that no number is typed by hand.

    python docs/generate.py            writes docs/measured.md, docs/published.md, docs/reference/cli.md and the marked blocks of README.md and docs/mods.md
    python docs/generate.py --check    exit 1 when one of them is not what it would write

This file says which page gets what; `docs/tables` makes the tables. Needs loka and its command line (typer), no torch.
"""

import re
import sys
from pathlib import Path
from typing import Any

from tables import ablation, distributions, generative, kernels, models, published, serving, trained, zoo
from tables.results import table

ROOT = Path(__file__).resolve().parent.parent
TRAINED = "<!-- trained: written by docs/generate.py from benchmarks/results/h200/trained.json -->"
HURTS = "<!-- hurts: written by docs/generate.py from benchmarks/results/h200/hurts_usual.json -->"
SERVED = "<!-- served: written by docs/generate.py from benchmarks/results/h200/serving_generative.json -->"
DEMO = "<!-- demo: written by docs/generate.py from benchmarks/results/cpu/demo.json, demo_seed*.json and h200/demo.json -->"
ABLATION = "<!-- ablation: written by docs/generate.py from benchmarks/results/h200/ablation.json and ablation_latency.json -->"
END = "<!-- end of numbers -->"

SECTIONS = (
    ("Models that nobody rewrote", "zoo_training.json, zoo_training_max.json, zoo_inference.json, zoo_wukong_train.json, zoo_wukong_infer.json", zoo.zoo_table,
     "Plain PyTorch, whole training step with AdamW or inference, CUDA graphs, static shapes, in turns on one H200. \"Our layout\" is bf16 with the rewrites that keep the function, so that FP8's own share shows."),
    ("Other architectures, and families of ours", "zoo_tower_cross.json, zoo_wukong_infer.json, zoo_families.json, zoo_hstu.json", zoo.changed_table,
     "With mods (no biases, BlockNorm, hard swish: another function, to be trained) the baseline is bf16 of the model as it was. InterFormer and HSTU are compared with their own bf16 code of commit 1ed489d; what bf16 gained since (attention that passes over padding, rotary angles from a table) is in the column beside it."),
    ("Further models, nothing chosen", "zoo_more_1.json to zoo_more_5.json", zoo.more_table,
     "Ten more models as their papers' readers write them (`benchmarks/zoo_more.py`), every chain and every linear of 256 and more in FP8 whatever it costs; `tune` would leave out what does not pay. Default compile mode on all sides, one run of five models "
     "each. MMoE, progressive layered extraction and MaskNet in inference are of the code that compiles gates as sums and quantises an input once for all that read it, which is most of what the first two gain; the gated cross network, two towers, DeepFM and the behaviour sequence transformer are of the code before, the rest from before dropout inside chains and folded batch norms."),
    ("One call of tune", "tune_zoo.json, tune_zoo_cross.json, tune_zoo_wukong.json, tune_zoo_wukong_serve.json, tune_zoo_more.json, tune_zoo_ungraphed.json, trained.json", zoo.tune_table,
     "The same models, trained 500 steps on labels of a fixed teacher, or a third of a training on real data (Census-Income), then tuned on batches they had not seen: speed and loss of one configuration. "
     "The step is forward and backward, without an optimizer; of the six-layer Wukong that is served with a copy of the inputs in it, on both sides, which is not made any more. The encoder had hardly learned, and tune said so. Launched kernel by kernel (`cuda_graph=False`) the DLRM keeps the layout and nothing in FP8: its launches take longer than its kernels."),
    ("Fast and loss-neutral in one configuration", "trained.json, trained_mods.json, trained_interformer.json, trained_hstu.json", trained.trained_table,
     "Plain models on real data, trained from the same weights on the same batches, seed by seed; the models that were trained are the ones that were timed (whole step with AdamW, CUDA graph, alone on the card). Pairs are ours / what it is compared with."),
    ("Where naive FP8 hurts", "hurts.json, hurts_usual.json, hurts_wide.json", trained.hurts_table,
     "Features as delivered, Adam at four times the usual rate (0.004) and at the usual one (0.001), no annealing, no dropout; the test loss is the median over twenty looks, ten in the earlier and ten in the later half of the run. Naive is torchao's tensorwise at every linear it takes. A wide interval says that bf16 itself differs so much between seeds: at 0.004 most bf16 runs on the stream stop learning in the later half and predict a constant."),
    ("Models of this package", "fp8_models.json", models.models_table,
     "Step time of whole models, compiled on all sides; every speed-up is over the model's bf16 case."),
    ("One fused layer", "fused_linear.json, fused_linear_training.json", kernels.fused_table,
     "GEMM, BlockNorm-256, hard swish and FP8 output in one kernel, against compiled bf16 linear, RMSNorm and SiLU."),
    ("From which size FP8 pays", "dispatch/rows.json", kernels.size_table,
     "One linear's GEMM with the quantisation of both operands, the best of all recipes and kernels, smallest product first; below 1.00x FP8 costs time. "
     "Where K or N is no multiple of 16, bf16 itself is slow. Fused into the layer before, or with weights quantised once per step, quantisation costs less: see the layers and models above."),
    ("Attention over padded histories", "masked_attention.json", kernels.masked_table,
     "`kernels/masked_attention`, bf16, beside torch's scaled_dot_product_attention with the same mask; queries beyond the end of a history are not answered where there are as many as keys."),
    ("Exported packages", "export_zoo.json", kernels.package_table,
     "A frozen model as an AOTInductor package beside the same model compiled, neither in a CUDA graph: a package launches its kernels without Python."),
    ("The choice of kernels", "dispatch/dispatch.json", kernels.dispatch_table,
     "What a plan made from database rows runs, over the fastest kernel that could have been chosen."),
    ("scaled_mm", "scaled_mm.json", lambda: kernels.bench_table("h200/scaled_mm.json"), "The GEMM alone; quantisation has its own rows."),
    ("quantize", "quantize.json", lambda: kernels.bench_table("h200/quantize.json"), "A tensor, and where asked its transpose, to FP8. The bf16 column is a copy of the same tensor."),
    ("What a probe costs", "probe_overhead.json", kernels.probe_table, "Statistics of every linear, gradients included, once in 100 steps."),
    ("The kernels of generation", "generative_kernels.json", lambda: kernels.bench_table("h200/generative_kernels.json"),
     "Grouped GEMM of experts, selection of the best beams, attention of all beams to one context; every tile that was tried is in the record."),
    ("The generative engine", "onerec_engine.json", generative.engine_table,
     "One batch through OneRec's search. Weights are random: this is speed, not quality."),
    ("Served under a deadline", "serving_generative.json, serving_ranker.json", serving.serving_table,
     "One process: uvicorn, our scheduler, the engine; requests over HTTP from another process, open loop, at 1.5 times what the engine sustains (or 60 % of that, whichever answered more in time). Answers equal the engine's own bit for bit. "
     "Weights are random: this is speed."),
    ("FP8 in trained generative models", "onerec_quality.json", generative.generative_quality_table,
     "OneRec, dense and with experts, trained on three data sets, then served by the engine in bf16, fp16 and FP8: FP8 against bf16, paired by user, margin 1 %. "
     "One data set has too few users to settle 1 % of recall; the last row weighs all changes by their precision."),
    ("FP8 in a OneRec with wide experts", "onerec_wide.json", generative.wide_table,
     "512 wide, eight experts of 1,408 and a shared one, trained on one H200: the published recipe (1x128 and 128x128 in experts) and ours (gate and up per row), FP8 against bf16, paired by user, margin 1 %."),
    ("Mods: the ablation", "ablation.json", ablation.ablation_table,
     "Wukong as it is and with each core mod, trained in bf16, naive FP8 (one scale per tensor, every linear) and planned FP8; all cells of a seed have the same weights and batches. "
     "Intervals are Student's over seeds, the margin is 0.1 % of log loss."),
    ("Mods: the latency of the same grid", "ablation_latency.json", ablation.latency_table,
     "Speed-ups are over the unmodified tower in bf16. Naive FP8 is tensorwise; a plan runs tensorwise or rowwise GEMM by GEMM, or the whole tower fused, which needs BlockNorm."),
    ("Trained in FP8, linear by linear", "ablation.json", ablation.loss_table,
     "Wukong on three data sets, trained in bf16 and in FP8 from the same weights on the same batches, seed by seed; no chains, and measured before them. \"Naive\" is one scale per tensor everywhere, which is what Probe, as it judged then, found safe in these models, so that both rows are one recipe."),
    ("The demo", "../cpu/demo.json, ../cpu/demo_seed1.json to ../cpu/demo_seed7.json", models.demo_table,
     "A Wukong of 2.2 M parameters on Complete Journey (a year of grocery baskets, 320,000 training examples), continued from one checkpoint in several ways, on a CPU: change of the test log loss against float32. Intervals are over test households; the control shows the noise of training that they do not contain."),
    ("The demo on a GPU", "demo.json", models.gpu_demo_table,
     "`loka demo --device cuda`: a DLRM with an over arch of 4,096-4,096-4,096-2,048 on the same data, batches of 8,192, 120 steps before and 40 after the fork, 88 s in all; the step is timed and compared too."),
    ("Quality of the models in high precision", "quality.json", models.quality_table, "Against popularity, Markov chains and logistic regression."),
)  # fmt: skip


def write_measured() -> str:
    """The page of numbers."""
    parts = [
        "# Numbers",
        "",
        "Written by `docs/generate.py` from the records in `benchmarks/results`; a test keeps this page and the records in step. Hardware, versions, "
        "commits and commands are in the records, what was slow or failed in `NOTES.md`. Intervals are 95 %; differences under 3 % are noise.",
    ]
    for title, source, make, text in SECTIONS:
        made = make()
        if made is not None:
            parts += [
                "",
                f"## {title}",
                "",
                f"{text} From `benchmarks/results/h200/{source}`." if "," not in source else f"{text} From {source}.",
                "",
                made,
            ]
    return "\n".join(parts) + "\n"


def write_published() -> str:
    """The page of published claims."""
    return "\n".join(
        [
            "# What the papers say, and what we saw",
            "",
            "The two systems that `loka` follows have no public code. Every claim of theirs that has a number, beside what our records say. Written by `docs/generate.py` from the records; "
            "a claim without a record says so. *Not confirmed here* is a statement about our models and one H200, not about theirs.",
            "",
            published.published_table(),
            "",
        ]
    )


def write_blocks(text: str, measured: str) -> str:
    """A page with its marked blocks made again; `measured` is where the page of numbers is from there."""
    summary = ablation.ablation_summary()
    blocks = (
        (ABLATION, summary and summary.replace("MEASURED", measured)),
        (TRAINED, trained.trained_headline()),
        (HURTS, trained.hurts_headline()),
        (SERVED, serving.serving_headline()),
        (DEMO, models.demo_headline()),
    )
    for begin, made in blocks:
        if made is not None:
            block = f"{begin}\n\n{made}\n\n{END}"
            text = re.sub(f"{re.escape(begin)}.*?{re.escape(END)}", lambda _, block=block: block, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def write_cli() -> str:
    """The command line, from its own help."""
    import typer

    from loka import cli

    command = typer.main.get_command(cli.app)
    parts = [
        "# Command line",
        "",
        "Generated by `docs/generate.py` from the code. Results go to stdout, progress and messages to stderr; `--json` prints results for scripts. "
        "Exit codes: 0 success, 1 a finding (e.g. `loka diff` found differences), 2 an invalid request or an internal error, 130 interrupted. "
        "`loka --debug VERB` shows the traceback of an error; `loka --install-completion` completes verbs and options in your shell.",
    ]
    for verb, found in command.commands.items():  # type: ignore[attr-defined]
        parts += ["", f"## loka {verb}", "", (found.help or "").strip()]
        shown = [line for line, _ in cli.examples_of(verb)]
        if shown:
            parts += ["", "```text", *shown, "```"]
        for name, sub in getattr(found, "commands", {"": found}).items():
            if name:
                parts += ["", f"### loka {verb} {name}", "", (sub.help or "").strip()]
            parts += ["", *_list_options(sub)]
    return "\n".join(parts) + "\n"


def _list_options(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        words = (
            ", ".join(f"`{o}`" for o in parameter.opts)
            if parameter.param_type_name == "option"
            else f"`{parameter.name.upper()}`"
        )
        default = parameter.default
        shown = (
            f"`{default}`"
            if default is not None and not callable(default) and default is not False and default != []
            else ""
        )
        rows.append([words, (getattr(parameter, "help", "") or "").replace("|", "\\|"), shown])
    return [table(["option", "what", "default"], rows)] if rows else []


def pages() -> dict[Path, str]:
    """What every generated file should hold."""
    readme, mods = ROOT / "README.md", ROOT / "docs" / "mods.md"
    looked_at = distributions.distributions_page()
    return {
        **({} if looked_at is None else {ROOT / "docs" / "distributions.md": looked_at}),
        ROOT / "docs" / "measured.md": write_measured(),
        ROOT / "docs" / "published.md": write_published(),
        ROOT / "docs" / "reference" / "cli.md": write_cli(),
        readme: write_blocks(readme.read_text(encoding="utf-8"), "docs/measured.md"),
        mods: write_blocks(mods.read_text(encoding="utf-8"), "measured.md"),
    }


def main() -> int:
    """Write, or check."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what docs/generate.py would write; run it")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
