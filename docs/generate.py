"""Generate pages and tables from the code and from committed results, so that no number is typed by hand.

    python docs/generate.py            writes docs/measured.md, docs/published.md, docs/reference/cli.md and the marked blocks of all other pages
    python docs/generate.py --check    exit with 1 if one of them is out of date

This file assigns tables to pages; `docs/tables` builds the tables. A marked block begins with `<!-- NAME: written by docs/generate.py from RECORDS -->`, where NAME is one of `BLOCKS`, and ends with
`<!-- end of numbers -->`. It may be in README.md or in any page of the manual. RECORDS are written, too: what the table has read.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import (
    ablation,
    distributions,
    generative,
    kernels,
    models,
    published,
    scale,
    serving,
    studies,
    trained,
    zoo,
)
from tables.results import make_with_records, table

ROOT = Path(__file__).resolve().parent.parent
BLOCKS: dict[str, Callable[[], str | None]] = {
    "trained": trained.trained_headline,
    "hurts": trained.hurts_headline,
    "inference": zoo.inference_headline,
    "served": serving.serving_headline,
    "demo": models.demo_headline,
    "demo_share": models.demo_share,
    "ablation": ablation.ablation_summary,
    "sweep": kernels.sweep_table,
    "defects": studies.defects_found,
    "score": studies.score_headline,
    "predictor": studies.predictor_table,
    "hazard": studies.hazard_table,
    "curves": scale.curves_table,
    "codecs": scale.codecs_table,
    "loss": scale.loss_table,
    "loss_single": scale.single_table,
    "loss_movielens": scale.movielens_table,
}
MARKED = re.compile(r"<!-- (\w+): written by docs/generate\.py from [^>]* -->\n.*?\n<!-- end of numbers -->", re.DOTALL)

SECTIONS = (
    ("Unmodified PyTorch models", zoo.zoo_table,
     "Plain PyTorch: whole training step with AdamW, or inference, in CUDA graphs with static shapes, measured alternately on one H200. \"Our layout\" is bf16 with only the rewrites that keep the function; it separates their gain from that of FP8."),
    ("Modified architectures, and models of this package", zoo.changed_table,
     "Mods (no biases, BlockNorm, hard swish) change the function, so the model must be trained with them; the baseline is the unmodified model in bf16. InterFormer and HSTU are compared with their own bf16 code at commit 1ed489d. The column \"bf16, with the changes\" is bf16 with the same mods, and for the latter two includes later bf16 improvements (attention that skips padding, rotary angles from a table)."),
    ("Further models, everything in FP8", zoo.more_table,
     "Ten more models in common implementations (`benchmarks/zoo_more.py`). Every chain and every linear of width 256 or more runs in FP8, whether that is faster or not; `tune` would leave out what is slower. Default compile mode for all, one run for every five models. "
     "The rows come from three states of the code. MMoE, progressive layered extraction and MaskNet in inference are the newest: gates compile to sums and an input that several layers read is quantized once, which is most of the gain of the first two. The gated cross network, two towers, DeepFM and the behaviour sequence transformer are one state older. The rest predates dropout inside chains and folded batch norms."),
    ("One call of tune", zoo.tune_table,
     "The same models, trained for 500 steps on labels of a fixed teacher, or for a third of a training run on real data (Census-Income), then tuned on batches they had not seen. Each row gives speed and loss of one configuration. "
     "The step is forward and backward without an optimizer. With `cuda_graph=False` tune gives the DLRM only the layout and no FP8: launching its kernels takes longer than running them."),
    ("Saved plans in fresh processes", zoo.fresh_table,
     "The plan of a call of `tune`, loaded in another process and converted there. By hand: every chain and wide linear in FP8 with `placing.plan_everything`, or bf16, whichever step is faster; it may cost more of the loss than `tune` accepts."),
    ("Fast and loss-neutral in one configuration", trained.trained_table,
     "Plain models on real data, trained from the same weights on the same batches, paired by seed. The trained configurations are the ones that were timed (whole step with AdamW, CUDA graph, no other work on the GPU; only InterFormer's was timed beside other work, so that its ratio counts and its milliseconds do not: 8.9 when alone). Pairs of numbers are ours / baseline."),
    ("Where naive FP8 hurts", trained.hurts_table,
     "Raw features, Adam at four times the usual learning rate (0.004) and at the usual one (0.001), no annealing, no dropout. The test loss is the median over ten evaluations in each half of the run. Naive is torchao tensorwise for every linear that torchao accepts. Wide intervals come from bf16 itself, which differs that much between seeds: at 0.004 most bf16 runs on the synthetic stream stop learning in the later half and predict a constant."),
    ("Models of this package", models.models_table,
     "Step time of whole models, all compiled. Every speed-up is over the model's bf16 case."),
    ("One fused layer", kernels.fused_table,
     "GEMM, BlockNorm-256, hard swish and FP8 output in one kernel, compared with compiled bf16 linear, RMSNorm and SiLU."),
    ("From which size FP8 pays", kernels.size_table,
     "The GEMM of one linear including the quantization of both operands, with the best of all recipes and kernels, smallest product first. Below 1.00x FP8 is slower. "
     "bf16 itself is slow where K or N is not a multiple of 16. Quantization costs less when it is fused into the previous layer or when weights are quantized once per step: see the layers and models above."),
    ("Attention over padded histories", kernels.masked_table,
     "`kernels/masked_attention` in bf16, compared with torch's scaled_dot_product_attention with the same mask. If there are as many queries as keys, queries beyond the end of a history are not computed."),
    ("Attention in FP8", kernels.attention_fp8_table,
     "Both products of attention in E4M3 (`benchmarks/attention_fp8.py`), compared with our bf16 kernels, in inference. HSTU and the masked attention are prototypes: queries are rounded inside the kernel, keys and values by a kernel of their own, with known scales. With that kernel only long histories of HSTU gain, so the library keeps bf16 there. "
     "In the engine the context is rounded once for 42 calls; `context_cache=\"e4m3\"` turns it on."),
    ("Exported packages", kernels.package_table,
     "A frozen model as an AOTInductor package, compared with the same model compiled, both without a CUDA graph. A package launches its kernels without Python. The results of a deep FP8 model move if its inputs are rounded differently, here by more than the package differs."),
    ("Embedding rows in 8 bits", kernels.rows_table,
     "Lookups of 65,536 bags of 20 items in 10 million rows, and the fused update of a step (rowwise Adagrad, stochastic rounding, duplicates summed first). In brackets: lookups over bf16 rows, updates over float32 rows. By Zipf's law one row has 6 % of all items, and most lookups are answered by the cache."),
    ("Packing for collectives", kernels.wire_table,
     "134 million elements into bytes with their scales inline, as all-to-all, all-gather and reduce-scatter send them, and back. The copy is a kernel that reads and writes as many bytes in all; packing reads more of them than it writes, which is why it can be above 100 %."),
    ("The choice of kernels", kernels.dispatch_table,
     "Time of the kernels chosen by a plan from database rows, relative to the fastest kernel available."),
    ("scaled_mm", lambda: kernels.bench_table("h200/scaled_mm.json"), "The GEMM alone, without quantization."),
    ("Quantizers", kernels.quantizers_table,
     "16-bit matrices of random shapes (64 to 32,768 rows; 256 to 8,192 columns, a third of them odd numbers) to FP8, and on request their transposes: the share of the bandwidth of a kernel that copies the bytes the math needs, "
     "which are x once, or twice where a scale depends on all of it, and every result once. \"Small\" matrices have less than 8 million elements; a copy of them takes 2 to 8 us, about as long as a launch, and scales that depend on all of x take a second one."),
    ("What a probe costs", kernels.probe_table, "Statistics of every linear, including gradients, on one step in 100."),
    ("How long an evaluation takes", kernels.evaluate_table,
     "`probe.evaluate()` with its defaults: three recipes on two backends, four distributions, every kernel judged by the conformance gate, and times, beside an idle training process. The target is 1.5 s a linear. The first look is of a later commit than the other row, which has not been measured again since kernels of chains and of candidates are judged while the others compile."),
    ("The kernels of generation", lambda: kernels.bench_table("h200/generative_kernels.json"),
     "Grouped GEMM of experts, selection of the best beams, attention of all beams to one context. The record has every tile that was tried."),
    ("The generative engine", generative.engine_table,
     "One batch through OneRec's beam search. Weights are random: this measures speed, not quality."),
    ("Served under a deadline", serving.serving_table,
     "One process runs our scheduler and the engine; HTTP is in the same process (OneRec) or in eight front processes (rankers, `loka serve --fronts 8`). Another process, four for rankers, sends HTTP requests in an open loop at 1.5 times the rate that the engine sustains, or at 60 % of that, whichever gave more answers in time; the first 0.3 s to a ranker are not counted. Answers equal those of the engine alone, bit for bit. "
     "Weights are random: this measures speed."),
    ("FP8 in trained generative models", generative.generative_quality_table,
     "OneRec, dense and with experts, trained on three data sets, then served by the engine in bf16, fp16 and FP8: FP8 compared with bf16, paired by user, margin 1 %. "
     "One data set has too few users to resolve 1 % of recall. The last row is the mean of all changes, weighted by their precision."),
    ("FP8 in a OneRec with wide experts", generative.wide_table,
     "512 wide, eight experts of 1,408 and a shared one, trained on one H200: the published recipe (1x128 and 128x128 in experts) and ours (gate and up per row), FP8 compared with bf16, paired by user, margin 1 %."),
    ("Mods: the ablation", ablation.ablation_table,
     "Wukong unmodified and with each core mod, trained in bf16, naive FP8 (one scale per tensor, every linear) and planned FP8; all cells of a seed have the same weights and batches. "
     "Intervals are Student's t over seeds. The margin is 0.1 % of the log loss."),
    ("Mods: the latency of the same grid", ablation.latency_table,
     "Speed-ups are over the unmodified tower in bf16. Naive FP8 is tensorwise. A plan chooses tensorwise or rowwise for each GEMM, or the whole tower fused, which needs BlockNorm."),
    ("Trained in FP8, linear by linear", ablation.loss_table,
     "Wukong on three data sets, trained in bf16 and in FP8 from the same weights on the same batches, paired by seed. Measured before chains existed. \"Naive\" is one scale per tensor everywhere. Probe, as it judged then, found that safe in these models, so both rows are the same recipe."),
    ("The demo", models.demo_table,
     "A Wukong of 2.2 M parameters on Complete Journey (a year of grocery baskets, 320,000 training examples), continued from one checkpoint in several ways, on a CPU: change of the test log loss compared with float32. Intervals are over test households. They do not contain the noise of training, which the control shows."),
    ("The demo on a GPU", models.gpu_demo_table,
     "`loka demo --device cuda`: a DLRM with an over arch of 4,096-4,096-4,096-2,048 on the same data, batches of 8,192, 120 steps before and 40 after the fork, 88 s in total. The step is timed too."),
    ("Quality of the models in high precision", models.quality_table, "Compared with popularity, Markov chains and logistic regression."),
)  # fmt: skip


def write_measured() -> str:
    """Return the page of numbers."""
    parts = [
        "# Numbers",
        "",
        "Written by `docs/generate.py` from the records in `benchmarks/results`, which each section names; a test checks that this page matches them. Hardware, versions, "
        "commits and commands are in the records. What was slow or failed is in `NOTES.md`. Intervals are 95 %. Differences in speed under 3 % are noise.",
    ]
    for title, make, text in SECTIONS:
        made, records = make_with_records(make)
        if made is not None:
            parts += ["", f"## {title}", "", f"{text} From {', '.join(f'`{name}`' for name in records)}.", "", made]
    return "\n".join(parts) + "\n"


def write_published() -> str:
    """Return the page of published claims."""
    return "\n".join(
        [
            "# Published claims and our measurements",
            "",
            "The two systems that `loka` follows have no public code. This table compares every numeric claim of their papers with our records. `docs/generate.py` writes it from the records and marks claims without one. "
            "*Not confirmed here* is a statement about our models on one H200, not about theirs.",
            "",
            published.published_table(),
            "",
        ]
    )


def write_blocks(text: str, folder: Path) -> str:
    """Return a page, which lies in `folder`, with its marked blocks regenerated. A block whose records are not there stays as it is."""

    def write(found: re.Match[str]) -> str:
        name = found[1]
        made, records = make_with_records(BLOCKS[name])
        if made is None:
            return found[0]
        begin = f"<!-- {name}: written by docs/generate.py from {', '.join(records)} -->"
        measured = os.path.relpath(ROOT / "docs" / "measured.md", folder)
        return f"{begin}\n\n{made.replace('MEASURED', measured)}\n\n<!-- end of numbers -->"

    return MARKED.sub(write, text)


def write_cli() -> str:
    """Return the reference of the command line, from its own help."""
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
    """Return the expected content of every generated file."""
    looked_at = distributions.distributions_page()
    whole = {
        **({} if looked_at is None else {ROOT / "docs" / "distributions.md": looked_at}),
        ROOT / "docs" / "measured.md": write_measured(),
        ROOT / "docs" / "published.md": write_published(),
        ROOT / "docs" / "reference" / "cli.md": write_cli(),
    }
    marked = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if path not in whole and MARKED.search(text):
            marked[path] = write_blocks(text, path.parent)
    return whole | marked


def main() -> int:
    """Write the generated files, or check them."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date; run docs/generate.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
