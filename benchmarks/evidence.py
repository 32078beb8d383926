"""Every number of README and docs, made again by one command: which script writes which record, what is stale, and in which order to spend the time there is.

    make evidence                                                   everything this machine can measure, an hour at most
    python benchmarks/evidence.py --list                            what there is, from which commit, what is missing or stale
    python benchmarks/evidence.py --data FOLDER --seconds 1800 --only zoo,tune

A record is stale when the code it measured has changed since: files under src/loka, or its script and what that imports of this folder, differ between the commit it names and this checkout;
how many do is said beside it, and so is a record that names no commit, or one with changes that were not committed (`+`). Missing and stale ones are made, oldest first, each in a process of its own with a limit; a job that ends well replaces its record, one that fails or runs out of time leaves the old one, and the next call goes on there.
Records are written whole by the script that measured them: nothing here edits one or joins two. Afterwards docs/generate.py writes the tables.

FOLDER holds the compact copies of the data sets that benchmarks/quality_data.py writes; jobs that need them are skipped without it, and said so.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
ROOT, RESULTS = BENCHMARKS.parent, BENCHMARKS / "results"
LOKA = (sys.executable, "-m", "loka")


@dataclass(frozen=True)
class Job:
    """One command and the records it writes. In `command`, {out} is the first record, {folder} where all are written, {data} the data folder,
    {results} where committed records are."""

    name: str
    records: tuple[str, ...]
    command: str
    seconds: float
    gpu: bool = True

    @property
    def needs_data(self) -> bool:
        """Whether the data folder is needed."""
        return "{data}" in self.command

    @property
    def script(self) -> Path | None:
        """The script, where it is one of ours."""
        first = self.command.split()[0]
        return (BENCHMARKS / first).resolve() if first.endswith(".py") else None

    def spell(self, folder: Path, data: Path | None) -> list[str]:
        """The command as it is run."""
        filled = self.command.format(out=folder / Path(self.records[0]).name, folder=folder, data=data, results=RESULTS)
        words = filled.split()
        return [*LOKA, *words[1:]] if words[0] == "loka" else [sys.executable, str(BENCHMARKS / words[0]), *words[1:]]


def spell_command() -> str:
    """How this process was called, for a record: file names without the folders of one machine."""
    return " ".join(Path(word).name if "/" in word else word for word in sys.argv)


def describe_run(device: str) -> dict[str, Any]:
    """What a record says of the run that wrote it: versions, commit, command, date; `device` is cuda or cpu."""
    import msgspec
    import torch

    from loka.records import capture_environment

    name = torch.cuda.get_device_name() if device == "cuda" else device
    found: dict[str, Any] = msgspec.to_builtins(capture_environment(command=spell_command(), device=name))
    return found


def gpu(name: str, records: str, command: str, seconds: float) -> Job:
    return Job(name, tuple(f"h200/{record}.json" for record in records.split()), command, seconds)


def cpu(name: str, records: str, command: str, seconds: float) -> Job:
    return Job(name, tuple(f"cpu/{record}.json" for record in records.split()), command, seconds, gpu=False)


PROBES = {
    "dlrm": "--steps 200",
    "wukong": "--steps 120 --samples 30",
    "hstu": "--steps 100 --batch-size 8 --metric recall@10 --sensitivity 1024",
}
# data, learning rate of tables, steps
LOSSES = (("ml-1m", 0.002, 500), ("census-income-kdd", 0.02, 300), ("complete-journey", 0.002, 300))
# data, settings of tables_loss.py
LOSSES_DRAWN = (
    (
        "ml-1m",
        "--ways float32,again,all,e4m3-nearest --learning-rate 0.003 --embedding-learning-rate 0.002 --steps 790 --draws 4",
    ),
    ("census-income-kdd", "--ways float32,all --embedding-learning-rate 0.02 --steps 300 --draws 3"),
    ("complete-journey", "--ways float32,all --embedding-learning-rate 0.002 --steps 300 --draws 2"),
)

JOBS = (
    gpu("zoo-train", "zoo_training", "zoo.py --modes train --ways bf16,bf16+max,bf16-layout,torchao-tensorwise,torchao-rowwise,loka,loka+max,loka-mods --out {out}", 600),
    gpu("zoo-infer", "zoo_inference", "zoo.py --models tower,cross,dlrm,encoder --modes infer --ways bf16,bf16+max,bf16-layout,torchao-rowwise,loka,loka+max --wait 112 --out {out}", 160),
    gpu("zoo-train-more", "zoo_training_max", "zoo.py --models wukong,encoder --modes train --ways bf16,bf16-layout,torchao-tensorwise,loka --out {out}", 400),
    gpu("zoo-train-modes-1", "zoo_training_modes_1", "zoo.py --models tower --modes train --ways bf16,bf16+max,bf16-layout,loka,loka+max --wait 250 --out {out}", 300),
    gpu("zoo-train-modes-2", "zoo_training_modes_2", "zoo.py --models dlrm,cross,encoder --modes train --ways bf16,bf16+max,loka,loka+max --wait 450 --out {out}", 520),
    gpu("zoo-dlrm-train", "zoo_dlrm_train", "zoo.py --models dlrm --modes train --ways bf16,bf16-layout,loka --wait 85 --out {out}", 120),
    gpu("zoo-float32", "zoo_float32", "zoo.py --models wukong,dlrm --modes train --ways fp32,tf32,bf16,loka --wait 120 --out {out}", 170),
    gpu("zoo-tower-cross", "zoo_tower_cross", "zoo.py --models tower,cross --modes infer --ways bf16,bf16+max,torchao-rowwise,loka,loka+max,loka-mods+max --wait 110 --out {out}", 160),
    gpu("zoo-wukong-infer", "zoo_wukong_infer", "zoo.py --models wukong --modes infer --ways bf16,bf16+max,bf16-layout,torchao-rowwise,loka,loka+max,loka-mods+max --wait 235 --out {out}", 280),
    gpu("zoo-wukong-train", "zoo_wukong_train", "zoo.py --models wukong --modes train --ways bf16,bf16-layout,torchao-rowwise,loka --wait 200 --out {out}", 250),
    gpu("zoo-mods-train", "zoo_mods_train", "zoo.py --models wukong,tower --modes train --ways bf16,bf16-mods,loka,loka-mods --wait 140 --out {out}", 200),
    gpu("zoo-families", "zoo_families", "zoo.py --models hstu,interformer --modes train,infer --ways bf16-before,bf16-before+max,bf16,loka --before {data}/before/src --wait 240 --out {out}", 320),  # {data}/before: a checkout of 1ed489d
    gpu("zoo-hstu", "zoo_hstu", "zoo.py --models hstu --modes infer --ways bf16-before,bf16-before+max,bf16,loka,loka+max --before {data}/before/src --wait 100 --out {out}", 170),
    gpu("zoo-baselines", "zoo_baselines", "zoo.py --models wukong,dlrm --modes train --ways bf16,bf16+max,bf16-layout,torchao-auto-tensorwise,torchao-rowwise_with_gw_hp,loka-towers,loka --wait 250 --out {out}", 330),
    gpu("zoo-more-1", "zoo_more_1", "zoo.py --models mmoe,llama,resmlp,bst,masknet --modes infer,train --ways bf16,torchao-rowwise,loka --wait 150 --out {out}", 240),
    gpu("zoo-more-2", "zoo_more_2", "zoo.py --models deepfm,twotower,gdcn,autoint,ple --modes infer,train --ways bf16,torchao-rowwise,loka --wait 150 --out {out}", 240),
    gpu("zoo-more-3", "zoo_more_3", "zoo.py --models mmoe,gdcn,twotower,deepfm,bst --ways bf16,torchao-rowwise,loka --wait 150 --out {out}", 240),
    gpu("zoo-more-4", "zoo_more_4", "zoo.py --models mmoe,ple,masknet --modes infer --ways bf16,bf16-layout,torchao-rowwise,loka --wait 150 --out {out}", 200),
    gpu("zoo-more-5", "zoo_more_5", "zoo.py --models mmoe,ple --modes train --ways bf16,bf16-layout,torchao-rowwise,loka --wait 200 --out {out}", 250),
    gpu("tune", "tune_zoo", "tune_zoo.py --models dlrm,tower,cross,encoder --limit 300 --out {out}", 400),
    gpu("tune-plain", "tune_zoo_plain", "tune_zoo.py --models dlrm,tower,cross,encoder --seconds 90 --limit 210 --out {out}", 300),
    gpu("tune-fresh", "tune_zoo_fresh", "tune_zoo.py --models wukong/train,tower,cross,encoder,wukong/serve --seconds 60 --fresh --no-torchao --limit 490 --out {out}", 560),
    gpu("tune-more", "tune_zoo_more", "tune_zoo.py --models mmoe,masknet --targets serve,train --limit 300 --seconds 90 --out {out}", 350),
    gpu("tune-encoder", "tune_zoo_encoder", "tune_zoo.py --models encoder --seconds 60 --out {out}", 180),
    gpu("tune-ungraphed", "tune_zoo_ungraphed", "tune_zoo.py --models dlrm --targets train --no-cuda-graph --out {out}", 90),
    gpu("export", "export_zoo", "export_zoo.py --models dlrm --out {out}", 150),
    gpu("export-wukong", "export_zoo_wukong", "export_zoo.py --models wukong --out {out}", 250),
    gpu("demo-gpu", "demo", "loka demo --device cuda --out {folder}/demo --json", 180),
    gpu("masked-attention", "masked_attention", "masked_attention_h200.py --out {out}", 60),
    gpu("tune-wukong", "tune_zoo_wukong", "tune_zoo.py --models wukong,dlrm --targets train --seconds 90 --out {out}", 250),
    gpu("tune-small", "tune_zoo_small", "tune_zoo.py --models twotower,bst,autoint,gdcn,llama --targets train --seconds 40 --steps 300 --out {out}", 350),
    gpu("tune-serve", "tune_zoo_serve", "tune_zoo.py --models wukong,cross --targets serve --seconds 60 --limit 110 --out {out}", 160),
    gpu("tune-dlrm", "tune_zoo_dlrm", "tune_zoo.py --models dlrm --seconds 60 --fresh --limit 200 --out {out}", 260),
    gpu("trained", "trained", "trained.py --root {data} --out {out} --seeds 64,500 --seconds 400", 480),
    gpu("trained-plain", "trained_plain", "trained.py --root {data} --families wukong,dlrm --arms bf16,tuned --seeds 40,150 --out {out} --seconds 330", 420),
    gpu("trained-wukong", "trained_wukong", "trained.py --root {data} --families wukong --arms bf16,tuned,naive,mods,tuned-mods --seeds 40 --out {out} --seconds 500", 580),
    gpu("trained-dlrm-mods", "trained_dlrm_mods", "trained.py --root {data} --families dlrm --arms bf16,mods,tuned-mods --seeds 80 --out {out} --seconds 175", 240),
    gpu("trained-hstu", "trained_hstu", "trained.py --root {data} --families hstu --arms bf16,tuned --out {out} --seconds 230", 300),
    gpu("trained-interformer", "trained_interformer", "trained.py --root {data} --families interformer --arms bf16,tuned --out {out} --seconds 240", 310),
    gpu("evaluate", "evaluate_time", "evaluate_time.py --out {out}", 270),
    gpu("evaluate-cold", "evaluate_time_cold", "evaluate_time.py --models wukong --caches cold --out {out}", 150),
    gpu("policies", "policies", "policies.py --tuned {results}/h200/tune_zoo_wukong.json --out {out} --seconds 240", 320),
    gpu("learned", "learned_wukong", "learned.py --root {data} --out {folder} --families wukong --samples 60", 240),
    gpu("shapes", "shapes", "shapes.py --out {out} --seconds 60", 120),
    gpu("hurts", "hurts", "hurts.py --root {data} --out {out} --seconds 190", 260),
    gpu("hurts-usual", "hurts_usual", "hurts.py --root {data} --out {out} --rate 1e-3 --data criteo-like --seconds 150", 220),
    gpu("hurts-wide", "hurts_wide", "hurts.py --root {data} --out {out} --width 2048 --rate 1e-3 --data criteo-like --seeds 4 --least 4 --seconds 380", 460),
    gpu("models", "fp8_models", "fp8_models.py --out {out}", 600),
    gpu("kernels", "quantize norm_quantize scaled_mm fused_linear fused_linear_training", "kernels_h200.py --out {folder}", 300),
    gpu("fused-linear", "fused_linear_sweep", "fused_linear_sweep.py --out {folder} --shapes 40 --seed 1 --named", 200),
    gpu("quantizers", "quantizers", "quantizers_sweep.py --shapes 14 --seed 5 --repeats 7 --seconds 150 --out {out}", 200),
    gpu("defects-large", "defects", "defects.py --device cuda --workers 1 --limits 16384 4096 4096 --count 1000 --out {out}", 600),
    gpu("dispatch", "dispatch/rows dispatch/dispatch", "dispatch_h200.py --out {folder} --seconds 240", 300),
    gpu("libraries", "libraries", "device_libraries.py --out {out}", 200),
    gpu("sweep", "sweep", "device_libraries.py --out {out} --sweep 400", 300),
    gpu("attention", "attention", "attention_h200.py --seconds 60 --out {out}", 120),
    gpu("attention-fp8", "attention_fp8", "attention_fp8.py --seconds 120 --out {out}", 180),
    gpu("layouts", "models", "models.py --out {out}", 300),
    gpu("probe", "probe_overhead", "probe_overhead.py --out {out} --seconds 300", 360),
    gpu("wire", "wire", "tables_h200.py --only wire --out {out}", 60),
    gpu("tables", "tables", "tables_h200.py --seconds 60 --out {out}", 120),
    gpu("tables-tiles", "tables_tiles", "tables_h200.py --sweep --only lookups,wire --widths 256,32,128 --seconds 55 --out {out}", 90),
    gpu("generative-kernels", "generative_kernels", "generative_kernels.py --seconds 150 --out {out}", 240),
    gpu("engine", "onerec_engine", "onerec_engine.py --out {out} --no-tune --contexts 512,3000 --batches 8,16 --compiled-batches 8 --seconds 185", 240),
    gpu("engine-3000", "onerec_engine_3000", "onerec_engine.py --out {out} --no-tune --contexts 3000 --batches 8,16 --compiled-batches 8 --only 'fp8,fp8 mixed,fp8 mixed context,bf16,compiled' --seconds 200", 250),
    Job("engine-report", ("h200/engine_bench.json",), "onerec_engine.py --record-of {results}/h200/onerec_engine.json --out {out}", 60, gpu=False),
    gpu("engine-quality", "onerec_quality", "onerec_quality.py --root {data} --out {out} --seconds 500", 600),
    gpu("engine-quality-wide", "onerec_wide", "onerec_quality.py --root {data} --out {out} --models wide --only ml-1m --seeds 0,1,2 --users 3000 --no-sensitivity --seconds 240", 300),
    gpu("serving-generative", "serving_generative", "serving_h200.py --part generative --contexts 512,3000 --out {out} --limit 300", 360),
    gpu("serving-generative-3000", "serving_generative_3000", "serving_h200.py --part generative --variants fp8,bf16 --contexts 3000 --slas 100 --out {out} --limit 110", 150),
    gpu("serving-ranker", "serving_ranker", "serving_h200.py --part ranker --fronts 8 --generators 4 --out {out} --limit 200", 240),
    gpu("serving-ranker-4096", "serving_ranker_4096", "serving_h200.py --part ranker --fronts 8 --generators 4 --rows 4096 --slas 100 --limit 62 --out {out}", 100),
    gpu("quality", "quality", "quality.py --root {data} --out {out} --processes 8", 600),
    gpu("mods", "ablation", "ablation.py --root {data} --out {out} --seeds 8 --processes 8 --seconds 480", 600),
    gpu("mods-latency", "ablation_latency", "ablation_latency.py --out {out} --modes infer --seconds 120", 200),
    cpu("learned-dlrm", "learned_dlrm", "learned.py --root {data} --out {folder} --families dlrm --device cpu", 1200),
    cpu("demo", "demo", "loka demo --out {folder}/demo --json", 600),
    cpu("defects", "defects", "defects.py --count 1000 --seed 0 --workers 2 --out {out}", 3600),
    cpu("predictor", "predictor", "predictor.py --out {out} --seconds 3600", 3700),
    cpu("hazard", "hazard", "hazard.py --out {out} --seeds 4", 1800),
    cpu("guard", "guard", "guard_overhead.py --out {out}", 600),
    cpu("planted", "planted", "planted.py --out {out}", 900),
    cpu("stress", "stress", "stress.py --out {out}", 1800),
    cpu("serving", "serving", "serving.py --out {out} --seconds 10", 600),
    cpu("serving-joining", "serving_joining", "serving_joining.py --out {out}", 300),
    cpu("serving-memory", "serving_memory", "serving.py --out {out} --only memory --seconds 100", 300),
    cpu("serving-context", "serving_context", "serving_context.py runs/onerec --out {out} --users 1500", 900),  # runs/onerec: see its docstring
    cpu("serving-start", "serving_start", "serving.py --out {out} --only start --bundle runs/onerec", 120),  # runs/onerec: loka generate --train 100 --out runs/onerec
    cpu("serving-ray-front", "serving_ray_front", "serving_ray.py --out {out} --only front", 300),
    cpu("serving-ray-capacity", "serving_ray_capacity", "serving_ray.py --out {out} --only capacity --seconds 10", 300),
    cpu("serving-ray-kills", "serving_ray_kills", "serving_ray.py --out {out} --only kills --requests 100000 --every 2 --limit 480", 700),
    cpu("serving-ray-changes", "serving_ray_changes", "serving_ray.py --out {out} --only drain,reload --seconds 10", 300),
    cpu("serving-ray-ingress", "serving_ray_ingress", "serving_ray.py --out {out} --only ingress", 200),
    *(cpu(f"tables-loss-{d}", f"tables-loss-{d}", f"tables_loss.py --data {d} --out {{out}}", 3600) for d in ("ml-1m", "census-income-kdd", "complete-journey")),
    *(cpu(f"loss-all-{d}", f"loss-all-{d}", f"tables_loss.py --data {d} {settings} --out {{out}}", 7200)
      for d, settings in LOSSES_DRAWN),
    *(cpu(f"loss-single-{d}", f"loss-single-{d}", f"tables_loss.py --data {d} --ways float32,all,forced,e4m3-nearest --embedding-learning-rate {rate} --steps {steps} --draws 1 --out {{out}}", 7200)
      for d, rate, steps in LOSSES),
    cpu("scale-matrix", "scale-matrix", "../tests/training/scale_matrix.py --out {out}", 1800),
    cpu("scale-kills", "scale-kills", "../tests/training/scale_kills.py --out {out}", 1800),
    cpu("scale-kills-row", "scale-kills-row", "../tests/training/scale_kills.py --sharding row --seed 1 --out {out}", 1800),
    cpu("simulated-curves", "simulated-curves", "simulated_curves.py --out {out}", 120),
    *(cpu(f"demo-seed{n}", f"demo_seed{n}", f"loka demo --seed {n} --out {{folder}}/demo --json", 600) for n in range(1, 8)),
    cpu("distributions", "distributions", "distributions.py --root {data} --work {folder}/distributions --out {out} --seconds 330 --ranker-seconds 900 --language-seconds 1000 --onerec-steps 700 --figure {results}/../../docs/figures/distributions.svg", 3000),
    *(
        cpu(f"probe-{model}-{data}", f"probe-{model}-{data}", f"loka probe --model {model}:small --data {data} {how} --threads 1 --out {{out}}", 1800)
        for model, how in PROBES.items()
        for data in ("complete-journey", "ml-1m")
    ),
)  # fmt: skip


@dataclass(frozen=True)
class State:
    """What is known of a job's records."""

    word: str  # missing, stale or current
    commit: str | None
    date: str
    why: str = ""

    @property
    def due(self) -> bool:
        """Whether it should be made again."""
        return self.word != "current"


def look(job: Job) -> State:
    """Missing, stale or current, by the first of the job's records that names its commit."""
    lacking = [record for record in job.records if not (RESULTS / record).exists()]
    if lacking:
        return State("missing", None, "", f"no {', '.join(lacking)}" if len(job.records) > 1 else "")
    named = [origin_of(json.loads((RESULTS / record).read_text(encoding="utf-8"))) for record in job.records]
    commit, date = next((pair for pair in named if pair[0]), named[0])
    why = why_stale(commit, job)
    return State("stale" if why else "current", commit, date, why)


def origin_of(record: Any) -> tuple[str | None, str]:
    """The commit and the date that a record names: in its environment, beside it, in a part of it, or in the newest of its groups of rows."""
    if not isinstance(record, dict):
        return None, ""
    groups = [group.get("origin") or {} for group in record.get("groups") or [] if isinstance(group, dict)]
    inside = [part["environment"] for part in record.values() if isinstance(part, dict) and isinstance(part.get("environment"), dict)]  # fmt: skip
    places = [
        record.get("environment") or {},
        record,
        *inside,
        *sorted(groups, key=lambda o: str(o.get("date")), reverse=True),
    ]
    place = next((place for place in places if place.get("commit")), places[0])
    return place.get("commit"), str(place.get("date", ""))


def why_stale(commit: str | None, job: Job) -> str:
    """What was measured is not what is here, in words; nothing where it is."""
    if not commit:
        return "it names no commit"
    base = commit.split()[0].rstrip("+,")
    paths = ["src/loka", *(str(file.relative_to(ROOT)) for file in sources_of(job.script))]
    asked = subprocess.run(["git", "diff", "--name-only", base, "--", *paths], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        return f"{base} is no commit of this checkout"
    changed = asked.stdout.split()
    own = [Path(file).name for file in changed if not file.startswith("src/loka")]
    reasons = [f"{len(changed) - len(own)} files of src/loka changed since"] if len(changed) > len(own) else []
    reasons += [f"{', '.join(own)} changed since"] if own else []
    reasons += ["of a checkout with changes"] if "+" in commit else []
    return "; ".join(reasons)


def sources_of(script: Path | None) -> list[Path]:
    """A script and the modules beside it that it imports, directly or not."""
    found: dict[Path, None] = {}
    waiting = [script] if script and script.exists() else []
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            names = re.findall(r"^\s*(?:from|import)\s+(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
            waiting += [beside for name in names if (beside := file.parent / f"{name}.py").exists()]
    return [file for file in found if file.name != "evidence.py"]  # a new job makes no other one's record old


def has_gpu() -> bool:
    """Whether torch finds a GPU, asked in a process of its own: CUDA must not be initialised beside what is timed."""
    asked = [sys.executable, "-c", "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"]
    return subprocess.run(asked, capture_output=True).returncode == 0


def why_not(job: Job, on_gpu: bool, data: Path | None) -> str | None:
    """What this machine lacks for a job, or None."""
    if job.gpu and not on_gpu:
        return "needs a GPU"
    if job.needs_data and data is None:
        return "needs --data, the folder that benchmarks/quality_data.py writes"
    return None


def make(job: Job, work: Path, data: Path | None, seconds: float) -> str:
    """Run one job; its records replace the old ones only if it ends well. Returns how it ended."""
    folder = work / job.name
    folder.mkdir(parents=True, exist_ok=True)
    command = job.spell(folder, data)
    log = folder / "log.txt"
    with log.open("ab") as out:
        try:
            ended = subprocess.run(
                command, cwd=ROOT, stdout=_stdout(job, folder, out), stderr=out, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            return f"out of time after {seconds:.0f} s; what it left in {folder} is where the next call goes on"
    made = [folder / Path(record).name for record in job.records]
    broken = [path.name for path in made if not _is_json(path)]
    if ended or broken:
        reason = f"exit {ended}" if ended else f"did not write {', '.join(broken)}"
        return f"failed: {reason}; see {log}"
    for record, path in zip(job.records, made, strict=True):
        (RESULTS / record).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, RESULTS / record)
    shutil.rmtree(folder)
    return "made"


def _stdout(job: Job, folder: Path, log: Any) -> Any:
    """Commands that print their record have it taken from there."""
    prints = "{out}" not in job.command and "--json" in job.command
    return (folder / Path(job.records[0]).name).open("wb") if prints else log


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what there is and make nothing")
    parser.add_argument("--only", default="", help="names of jobs, or how they begin, comma-separated")
    parser.add_argument("--data", type=Path, help="folder of benchmarks/quality_data.py")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="start no job after this; the last one may run out its own limit"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "evidence", help="where jobs write while they run")
    a = parser.parse_args()
    wanted = tuple(filter(None, a.only.split(",")))
    jobs = [job for job in JOBS if not wanted or job.name.startswith(wanted)]
    if not jobs:
        parser.error(f"--only {a.only}: jobs are {', '.join(job.name for job in JOBS)}")
    states = {job.name: look(job) for job in jobs}
    for job in jobs:
        state = states[job.name]
        commit = (state.commit or "")[:14]
        print(f"{state.word:8} {job.name:32} {commit:14} {state.date[:10]:10}  {', '.join(job.records)}{f'  ({state.why})' if state.why else ''}")  # fmt: skip
    if a.list:
        return 0
    on_gpu, end, failed = has_gpu(), time.monotonic() + a.seconds, 0
    for job in sorted((job for job in jobs if states[job.name].due), key=lambda job: states[job.name].date):
        lack = why_not(job, on_gpu, a.data)
        if lack is None and time.monotonic() > end:
            lack = "no time left"
        ended = f"skipped: {lack}" if lack else make(job, a.work, a.data, min(job.seconds, 7200))
        failed += ended.startswith("failed")
        print(f"{job.name}: {ended}", flush=True)
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py")], cwd=ROOT, check=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
