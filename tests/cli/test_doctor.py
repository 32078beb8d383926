"""The doctor says what is there, what is not, and how to get it."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loka.cli import app
from loka.cli.doctor import LIBRARIES, Library, check_backends, check_library, check_required
from loka.kernels import registry
from loka.lowp.auto import spell_refusals

runner = CliRunner()


def test_python_and_torch_are_here() -> None:
    findings = {finding.name: finding for finding in check_required()}
    assert findings["Python"].ok
    assert findings["torch"].ok
    assert findings["GPU"].detail


def test_an_absent_library_comes_with_its_install_line() -> None:
    found = check_library(Library("no_such_library", "no-such-library", "torchao", "nothing"))
    assert not found.ok
    assert "not installed" in found.detail
    assert "pip install 'loka[torchao]'" in found.detail


def test_a_present_library_comes_with_its_version() -> None:
    found = check_library(Library("msgspec", "msgspec", "data", "records"))
    assert found.ok
    assert found.detail[0].isdigit()


def test_a_broken_library_says_why(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(str(tmp_path)) / "broken_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcuda.so.1 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_library(Library("broken_kernels", "broken", "fbgemm", "GEMMs"))
    assert not found.ok
    assert "libcuda.so.1 is missing" in found.detail


def test_every_extra_of_the_package_is_looked_for() -> None:
    """Whoever follows an install line of the documentation finds here whether it worked."""
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
    assert extras.keys() - {library.extra for library in LIBRARIES} == {"docs"}  # builds the manual, runs nothing
    for library in LIBRARIES:
        assert any(re.match(rf"{library.distribution}\b", wanted) for wanted in extras[library.extra]), library


def test_a_reason_names_the_recipes_it_is_about() -> None:
    refused = {"rowwise": "needs a GPU", "mxfp8": "takes float32 scales", "blockwise": "needs a GPU"}
    assert spell_refusals(refused) == "rowwise, blockwise: needs a GPU; mxfp8: takes float32 scales"


def test_every_backend_answers() -> None:
    findings = {finding.name: finding for finding in check_backends()}
    assert set(findings) == set(registry.BACKENDS["scaled_mm"])
    assert findings["reference"].ok
    assert all(finding.detail for finding in findings.values())


def test_json_is_for_scripts() -> None:
    result = runner.invoke(app, ["doctor", "--json"], obj={})
    assert result.exit_code == 0
    findings = json.loads(result.stdout)
    assert {"machine", "libraries", "FP8 GEMM backends"} == {finding["group"] for finding in findings}


def test_text_is_for_people() -> None:
    result = runner.invoke(app, ["doctor"], obj={})
    assert result.exit_code == 0
    assert "yes  Python" in result.stdout


def test_no_line_is_wider_than_a_terminal() -> None:
    lines = runner.invoke(app, ["doctor"], obj={}).stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith(("  yes", "  no ")) for line in lines) > 10
