"""Every committed record has a command that writes it, and only a command that ends well replaces one."""

import json
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import evidence  # noqa: E402


def test_every_committed_record_has_one_job() -> None:
    claimed = [record for job in evidence.JOBS for record in job.records]
    assert len(claimed) == len(set(claimed))
    committed = {str(p.relative_to(evidence.RESULTS)) for p in evidence.RESULTS.rglob("*.json")}
    assert committed <= set(claimed), f"no job writes {sorted(committed - set(claimed))}"


@pytest.mark.parametrize("job", [j for j in evidence.JOBS if j.script], ids=lambda job: job.name)
def test_a_job_gives_its_script_only_options_it_has(job: evidence.Job) -> None:
    text = job.script.read_text(encoding="utf-8")
    for option in re.findall(r"--[a-z-]+", job.command):
        assert f'"{option}"' in text, f"{job.script.name} takes no {option}"


def write_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> evidence.Job:
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(evidence, "BENCHMARKS", tmp_path)
    (tmp_path / "measure.py").write_text("import sys\nout = sys.argv[1]\n" + body)
    (tmp_path / "results" / "cpu").mkdir(parents=True)
    (tmp_path / "results" / "cpu" / "x.json").write_text('{"old": true}')
    return evidence.Job("x", ("cpu/x.json",), "measure.py {out}", 30, gpu=False)


def test_a_job_that_ends_well_replaces_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path, monkeypatch, "open(out, 'w').write('{\"new\": 1}')\n")
    assert evidence.make(job, tmp_path / "work", None, 30) == "made"
    assert json.loads((tmp_path / "results" / "cpu" / "x.json").read_text()) == {"new": 1}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("open(out, 'w').write('{\"new\": 1}'); sys.exit(3)\n", "exit 3"),
        ("open(out, 'w').write('{\"new\": ')\n", "did not write x.json"),
        ("import time; time.sleep(60)\n", "out of time"),
    ],
)
def test_a_job_that_does_not_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    job = write_job(tmp_path, monkeypatch, body)
    assert why in evidence.make(job, tmp_path / "work", None, 2 if "sleep" in body else 30)
    assert json.loads((tmp_path / "results" / "cpu" / "x.json").read_text()) == {"old": True}


def test_a_record_of_other_code_or_of_no_commit_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path, monkeypatch, "")
    monkeypatch.setattr(evidence, "why_stale", lambda commit, job: "" if commit == "same" else "changed")
    path = tmp_path / "results" / "cpu" / "x.json"
    for commit, word in (("same", "current"), ("other", "stale"), (None, "stale")):
        path.write_text(json.dumps({"environment": {"commit": commit}}))
        assert evidence.look(job).word == word
    path.unlink()
    assert evidence.look(job).word == "missing"
    assert "GPU" in evidence.why_not(evidence.gpu("y", "y", "y.py", 1), False, None)


def test_the_commit_is_found_wherever_a_record_keeps_it() -> None:
    assert evidence.origin_of({"environment": {"commit": "a", "date": "2026"}}) == ("a", "2026")
    assert evidence.origin_of({"commit": "b"}) == ("b", "")
    groups = [{"origin": {"commit": "old", "date": "1"}}, {"origin": {"commit": "new", "date": "2"}}]
    assert evidence.origin_of({"groups": groups}) == ("new", "2")
    assert evidence.origin_of({"rows": []}) == (None, "")
    assert evidence.origin_of([]) == (None, "")


def test_a_record_says_why_it_is_stale() -> None:
    (job,) = (job for job in evidence.JOBS if job.name == "trained")
    assert evidence.why_stale(None, job) == "it names no commit"
    assert "no commit of this checkout" in evidence.why_stale("0123456789abcdef", job)


def test_what_a_script_imports_of_its_folder_counts_as_its_source() -> None:
    (job,) = (job for job in evidence.JOBS if job.name == "trained")
    names = {file.name for file in evidence.sources_of(job.script)}
    assert {"trained.py", "trained_worker.py", "trained_families.py", "zoo.py", "quality_sequences.py"} <= names
    assert "hurts.py" not in names
    assert evidence.sources_of(None) == []
