"""The documentation: generated pages are what the code and the records say, links lead somewhere, Python in it is valid."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRIVATE = re.compile(r"/root\b|/work\b|/home/|/tmp/")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["docs/measured.md", "docs/reference/cli.md", "README.md"])
def test_generated_pages_are_in_step(name: str) -> None:
    made = generator().pages()[ROOT / name]
    assert (ROOT / name).read_text(encoding="utf-8") == made, f"{name} is stale: run python docs/generate.py"


def test_the_headline_follows_the_records() -> None:
    module = generator()
    made = module.headline_table()
    found = module.read("h200/fp8_models.json")
    assert made is not None
    assert f"**{found['speedup']['wukong-infer-loka']['speedup']:.2f}x**" in made
    assert len(made.splitlines()) == 2 + sum(name.endswith("-loka") for name in found["speedup"])


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
