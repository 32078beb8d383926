"""`loka ab`: compare two models, offline on the same users or online on live traffic, with intervals and a verdict.

    loka ab runs/onerec runs/onerec-fp8                  two generative recommenders, on the test users of their data
    loka ab runs/onerec runs/onerec-fp8 --users 500 --margin 0.01 --top 10 --out ab.json
    loka ab base.jsonl candidate.jsonl --margin 0.005    any models; one line per user: {"user": 7, "recall@10": 0.1}
    loka ab --online runs/ab --margin 0.01               an experiment of loka serve A B --events runs/ab, at any time

Reported per metric: both means, the relative change with a 95 % interval, and the verdict: equivalent within --margin,
better, worse or inconclusive. Higher is better, but for the metrics of --lower and, in files, for those with loss, error
or latency in their name. Offline, intervals are paired by user, and the minimum detectable effect (MDE) is added.
The sample ratio is checked first: each arm must have its expected share of users. Exit 1 if the sample ratio is off, a
metric is worse or a guardrail is broken; 2 if the request is invalid.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.places import check_file

if TYPE_CHECKING:
    from torch import Tensor

    from loka.records import OnlineTest, PairedTest


EXAMPLE_LINE = '{"user": 7, "metric": 0.1, ...}'


def ab(
    baseline: Annotated[
        Path | None, typer.Argument(help="Folder of a recommender, or a .jsonl file of per-user metrics.")
    ] = None,
    candidate: Annotated[Path | None, typer.Argument(help="The model to compare with it, of the same kind.")] = None,
    online: Annotated[
        Path | None, typer.Option(help="Folder of a live experiment's events, instead of models.")
    ] = None,
    lower: Annotated[
        str, typer.Option(help="Metrics of files or --online where lower is better, comma-separated.")
    ] = "",
    data: Annotated[str | None, typer.Option(help="Data set; default: the baseline's.")] = None,
    users: Annotated[int | None, typer.Option(help="Number of test users, from the first; default: all.")] = None,
    margin: Annotated[float, typer.Option(help="Relative change that counts as equivalent.")] = 0.01,
    top: Annotated[int | None, typer.Option(help="K of recall@K and NDCG@K; default: 10.")] = None,
    beams: Annotated[int | None, typer.Option(help="Width of the beam search; default: 50.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision of unquantized layers: bf16, fp16 or fp32 (default).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default) or cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the record here.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of raw data and caches.")] = None,
    source: Annotated[Path | None, typer.Option(help="Raw files of the data set.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Compare two models user by user."""
    from loka import records

    check_file("--out", out, [baseline, candidate])
    if not margin > 0 or (top is not None and top < 1):
        raise ValueError(f"--margin {margin:g} --top {top}: expected a number above 0, and at least 1")
    own = {"--data": data, "--users": users, "--top": top, "--beams": beams, "--precision": precision, "--device": device, "--data-root": data_root, "--source": source}  # fmt: skip
    words = [word.strip() for word in lower.split(",") if word.strip()]
    if online is not None:
        if baseline is not None or candidate is not None:
            raise ValueError("--online reads an experiment's folder and takes no models")
        _refuse("--online reads the events of an experiment", own)
        judge_online(online, margin, words, out, json_)
        return
    if baseline is None or candidate is None:
        raise ValueError("give two models, or --online FOLDER")
    kinds = {path.suffix == ".jsonl" for path in (baseline, candidate)}
    if len(kinds) > 1:
        raise ValueError(f"{baseline} and {candidate}: compare two folders or two .jsonl files")
    if kinds == {True}:
        _refuse(f"{baseline} and {candidate} hold metrics", own)
        found = compare_files(baseline, candidate, margin, seed, words)
    else:
        _refuse("in every metric of a recommender higher is better", {"--lower": lower or None})
        evaluation = {
            "users": users,
            "beams": 50 if beams is None else beams,
            "tops": (10 if top is None else top,),
            "dtype": precision or "fp32",
            "device": device or "cpu",
        }
        found = compare_bundles(baseline, candidate, data, data_root, source, margin, seed, evaluation)
    if out is not None:
        records.save(found, out)
    typer.echo(records.to_json(found).decode() if json_ else describe(found))
    if found.split.mismatch or any(metric.outcome == "worse" for metric in found.metrics):
        raise typer.Exit(1)


def _refuse(why: str, options: dict[str, Any]) -> None:
    """Raise ValueError for options of another kind of comparison, instead of ignoring them."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{', '.join(given)}: cannot be honoured: {why}")


def judge_online(folder: Path, margin: float, lower: list[str], out: Path | None, as_json: bool) -> None:
    """Evaluate an experiment on live traffic, print it, and exit 1 if it went badly."""
    from loka import records
    from loka.serving.online import judge_experiment

    found = judge_experiment(folder, margin=margin, lower_is_better=lower)
    if out is not None:
        records.save(found, out)
    typer.echo(records.to_json(found).decode() if as_json else describe_online(found))
    bad = any(m.outcome == "worse" for m in found.metrics) or any(g.broken for g in found.guardrails)
    if found.split.mismatch or bad:
        raise typer.Exit(1)


def describe_online(found: OnlineTest) -> str:
    """Format an online test as text."""
    ratio = "MISMATCH, do not read the metrics" if found.split.mismatch else "no mismatch found"
    lines = [
        f"{found.candidate} against {found.baseline}, experiment {found.salt}",
        f"users {' / '.join(f'{n:,}' for n in found.split.observed)}: {ratio} (p {found.split.p_value:.3g} at any time); "
        f"requests {' / '.join(f'{n:,}' for n in found.requests)}, {found.duplicates:,} repeated and left out",
    ]
    for m in found.metrics:
        change = (
            "too few users yet"
            if m.change is None
            else f"{100 * m.change.value:+.2f} % [{100 * m.change.low:+.2f}, {100 * m.change.high:+.2f}]"
        )
        lines.append(
            f"{m.metric:16} {m.baseline:.5g} -> {m.candidate:.5g}: {change}, margin {100 * m.margin:g} %: {m.outcome}"
        )
    if not found.metrics:
        lines.append("no metric: no outcome of an answered request was sent to POST /v1/outcome")
    lines += [
        f"guardrail {g.name}: {g.baseline:.4g} -> {g.candidate:.4g}, {g.limit}: {'BROKEN' if g.broken else g.verdict}"
        for g in found.guardrails
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def compare_files(baseline: Path, candidate: Path, margin: float, seed: int, lower: list[str]) -> PairedTest:
    """Compare two files of per-user metrics, which may come from any system."""
    from loka.inference import compare_arms

    (first, a), (second, b) = read_metrics(baseline), read_metrics(candidate)
    return compare_arms(
        a, b, (first, second), margin=margin, names=(baseline.name, candidate.name), data="files", seed=seed,
        lower_is_better=lower,
    )  # fmt: skip


def read_metrics(path: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the users and one tensor per metric. Every user has one line, and every line the same metrics."""
    import torch

    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    users: list[int] = []
    columns: dict[str, list[float]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            user, values = row.pop("user"), {name: float(value) for name, value in row.items()}
            if type(user) is not int or not -(2**63) <= user < 2**63:  # int() would make one user of 1.2 and 1.7
                raise ValueError(f"user {user!r} is not an integer of 64 bits")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: expected {EXAMPLE_LINE} ({error})") from error
        if users and set(values) != set(columns):
            raise ValueError(f"{path}:{number}: has the metrics {sorted(values)}, the lines before {sorted(columns)}")
        users.append(user)
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    if not columns:
        raise ValueError(f"{path}: no metrics; expected one line per user: {EXAMPLE_LINE}")
    if len(set(users)) < len(users):
        raise ValueError(f"{path}: {len(users):,} lines of {len(set(users)):,} users; expected one line per user")
    return torch.tensor(users), {name: torch.tensor(c, dtype=torch.float64) for name, c in columns.items()}


def compare_bundles(
    baseline: Path, candidate: Path, data: str | None, root: Path | None, source: Path | None, margin: float, seed: int,
    evaluation: dict[str, Any],
) -> PairedTest:  # fmt: skip
    """Compare two recommenders on the test users of one data set. `evaluation` are options of `evaluate_users`."""
    from rich.console import Console

    from loka.cli.subject import find_device
    from loka.inference import compare_arms, evaluate_users, load_bundle, overlap_of

    find_device(evaluation["device"])
    bundles = [load_bundle(path) for path in (baseline, candidate)]
    opened = bundles[0].open_data(data, root=root, source=source)
    arms: list[Any] = []
    with Console(stderr=True).status("recommending") as status:
        for path, bundle in zip((baseline, candidate), bundles, strict=True):

            def show(done: int, total: int, name: str = path.name) -> None:
                status.update(f"{name}: {done} of {total} users")

            arms.append(evaluate_users(bundle, opened.test, progress=show, **evaluation))
    return compare_arms(
        arms[0].values,
        arms[1].values,
        (arms[0].users, arms[1].users),
        margin=margin,
        names=(baseline.name, candidate.name),
        data=opened.name,
        overlap=overlap_of(arms[0], arms[1], (10, 50, 512)),
        seed=seed,
    )


def describe(found: PairedTest) -> str:
    """Format an offline comparison as a table."""
    ratio = found.split
    lines = [
        f"{found.candidate} against {found.baseline}, {found.data}",
        f"sample ratio {' / '.join(f'{n:,}' for n in ratio.observed)}: "
        + ("MISMATCH, do not read the metrics" if ratio.mismatch else f"no mismatch found (p {ratio.p_value:.3g})"),
        f"{'metric':16} {'baseline':>10} {'candidate':>10} {'change':>10} {'95 % interval':>22} {'MDE':>8}  verdict",
    ]
    for m in found.metrics:
        c = m.change
        lines.append(
            f"{m.metric:16} {m.baseline:10.5f} {m.candidate:10.5f} {100 * c.value:+9.3f}% "
            f"[{100 * c.low:+8.3f}, {100 * c.high:+8.3f}]% {100 * m.minimum_detectable:7.3f}%  "
            f"{m.outcome} (margin {100 * m.margin:g} %, {m.users:,} users, {m.method})"
        )
    lines.append("MDE: minimum detectable effect, the change that this many users would show with 80 % power")
    if found.overlap:
        lines.append("overlap of the lists: " + ", ".join(f"@{o.n} {o.share:.1%}" for o in found.overlap))
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])
