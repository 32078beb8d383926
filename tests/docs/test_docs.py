"""The documentation: generated pages are what the code and the records say, links lead somewhere, Python in it is valid."""

import ast
import importlib.util
import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import typer

from loka import cli
from loka.cli.bench import parse_shapes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRIVATE = re.compile(r"/root\b|/work\b|/home/|/tmp/")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/generate.py, as `python docs/generate.py` finds it: with its folder on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_in_step(generate: ModuleType) -> None:
    stale = [path for path, made in generate.pages().items() if path.read_text(encoding="utf-8") != made]
    assert not stale, "run python docs/generate.py"


def test_every_block_is_used_and_every_marker_is_a_block(generate: ModuleType) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(generate.MARKED.findall(text)) == generate.BLOCKS.keys()
    assert (
        len(generate.MARKED.findall(text))
        == text.count("written by docs/generate.py from")
        == text.count("<!-- end of")
    )


def test_pages_name_the_records_that_were_read(generate: ModuleType) -> None:
    """A page once named a record that had never been made."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"\b(?:h200|cpu)/[\w/-]+\.json\b", text))
    assert "h200/trained_plain.json" in named
    assert [name for name in sorted(named) if not (ROOT / "benchmarks" / "results" / name).exists()] == []
    made, records = generate.make_with_records(
        lambda: str(generate.zoo.read("cpu/demo.json") and generate.zoo.read("h200/none.json"))
    )
    assert (made, records) == ("None", ["cpu/demo.json"])


def test_a_table_without_its_record_is_left_out(generate: ModuleType) -> None:
    assert generate.models.read("h200/fp8_models.json") is None
    assert "Models of this package" not in generate.write_measured()


def test_the_loss_follows_the_records(generate: ModuleType) -> None:
    made, found = generate.ablation.loss_table(), generate.ablation.read_ablation()
    assert made is not None
    for data in found.data:
        change = found.find(data, "none", "planned").against_bf16
        (row,) = (line for line in made.splitlines() if line.startswith(f"| {data} | planned"))
        assert f"{100 * change.change.value:+.3f} %" in row
        assert f"**{change.outcome}** | {change.seeds} |" in row


def test_without_an_ablation_nothing_is_said(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tables.results.RESULTS", tmp_path)
    made = generate.ablation
    assert (made.ablation_table(), made.latency_table(), made.ablation_summary()) == (None, None, None)


def test_a_block_without_its_records_stays_as_it_is(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "guides" / "scale-out.md").read_text(encoding="utf-8")
    monkeypatch.setattr("tables.results.RESULTS", tmp_path)
    assert generate.write_blocks(text, ROOT / "docs" / "guides") == text


def test_the_ablation_follows_its_records(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small real run of both scripts, on a CPU."""
    monkeypatch.setattr("tables.results.RESULTS", tmp_path)
    shutil.copytree(ROOT / "tests" / "docs" / "examples", tmp_path / "h200")
    found, latency = generate.ablation.read_ablation(), generate.ablation.read_latency()
    *lines, _, same = generate.ablation.ablation_table().splitlines()
    assert len(lines) == 2 + len(found.cells) == 2 + 15
    assert same.endswith("their difference is noise: complete-journey (none, no_bias, block_norm, hard_swish, all).")
    cell = found.find("complete-journey", "all", "planned")
    change = 100 * cell.against_original.change.value
    assert f"| {cell.log_loss:.5f} | {change:+.3f} % [" in lines[-1]
    assert f"**{cell.against_original.outcome}**" in lines[-1]
    times = generate.ablation.latency_table()
    row = latency.find("infer", 64, "all", "fused")
    assert f"{row.microseconds.value:.1f} us, {row.speedup.value:.2f}x [" in times
    assert times.count("refused |") == 6
    assert "BlockNorm" in times.splitlines()[-1]
    begin, end = "<!-- ablation: written by docs/generate.py from ablation.json -->", "<!-- end of numbers -->"
    page = generate.write_blocks(f"above\n{begin}\n\n{end}\nbelow", ROOT / "docs")
    assert page.startswith("above\n")
    assert page.endswith("\nbelow")
    assert "([all cells](measured.md))" in page
    assert f"- complete-journey: all mods, planned FP8 {change:+.3f} %" in page
    assert f"{row.speedup.value:.2f}x [{row.speedup.low:.2f}, {row.speedup.high:.2f}] at batch 64" in page
    assert generate.write_blocks(page, ROOT / "docs") == page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text):
        assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} links to {link}, which is not there"
    assert not PRIVATE.search(text), f"{page.relative_to(ROOT)} names a path of one machine"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_pages_is_valid(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block.replace("-> Verdict(ok, reason)", "").replace("-> outputs", ""))


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [
        str(p.relative_to(ROOT / "docs"))
        for p in PAGES
        if p.is_relative_to(ROOT / "docs") and str(p.relative_to(ROOT / "docs")) not in nav
    ]
    assert missing == []


COMMANDS = [
    (page, line.strip())
    for page in PAGES
    for line in re.sub(r"\\\n +", "", page.read_text(encoding="utf-8")).splitlines()
    if re.match(r" {0,6}(loka |torchrun .*-m loka )", line) and "..." not in line
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda each: each if isinstance(each, str) else each.stem)
def test_commands_can_be_copied(page: Path, line: str) -> None:
    """As they stand, with what is said about them behind a #: every word is one that the command line knows."""
    assert "  " not in line.partition("#")[0].strip(), "a remark without its #: the shell would take it for arguments"
    words = shlex.split(line, comments=True)
    words = words[words.index("loka") + 1 :]
    command, context = typer.main.get_command(cli.app), None
    while isinstance(command, typer.core.TyperGroup) and (words or not command.invoke_without_command):
        context = command.make_context("loka", words, parent=context, resilient_parsing=True)
        name, found, words = command.resolve_command(context, words)
        assert found is not None, f"there is no verb {name!r}"
        command = found
    found = command.make_context(command.name, list(words), parent=context)
    if words and line.startswith("loka bench kernels"):
        parse_shapes(found.params["shapes"], found.params["op"])


def test_the_guide_to_the_notes_names_entries_that_exist() -> None:
    text = (ROOT / "NOTES.md").read_text(encoding="utf-8")
    guide = text.partition("## How to find things")[2].partition("\n## ")[0]
    headings = re.findall(r"(?m)^## \d{4}-\d\d-\d\d: (.+)$", text)
    named = re.findall(r'"([^"]+)"', guide)
    assert len(named) > 20
    assert [name for name in named if not any(heading.startswith(name) for heading in headings)] == []
