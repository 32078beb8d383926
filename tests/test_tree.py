"""The tree is what README says it is, and every folder of it is a package with a docstring and an explicit __all__."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "loka"
IGNORED = {"__pycache__", "__init__.py", "__main__.py", "py.typed"}


def folders() -> list[Path]:
    found = [PACKAGE, *(p for p in PACKAGE.rglob("*") if p.is_dir() and p.name != "__pycache__")]
    return [path for path in found if any(child.suffix == ".py" for child in path.iterdir())]


@pytest.mark.parametrize("folder", folders(), ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_every_folder_is_a_package_that_says_what_it_is(folder: Path) -> None:
    init = folder / "__init__.py"
    assert init.is_file(), f"{folder} has Python files but no __init__.py"
    tree = ast.parse(init.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{init} has no docstring"
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names |= {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert "__all__" in names, f"{init} has no __all__"


def rooms_on_disk() -> set[str]:
    names = set()
    for path in PACKAGE.iterdir():
        if path.name in IGNORED or path.name.startswith("."):
            continue
        if path.is_dir() and any(path.rglob("*.py")):
            names.add(f"{path.name}/")
        elif path.suffix == ".py":
            names.add(path.name)
    return names


def test_the_readme_maps_the_tree() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```text\nsrc/loka/\n(.*?)```", text, re.DOTALL)
    assert found is not None, "README.md has no map of src/loka/"
    mapped = {line.split()[0] for line in found[1].splitlines() if line.strip()}
    on_disk = rooms_on_disk()
    assert mapped == on_disk, f"only in README: {sorted(mapped - on_disk)}; only on disk: {sorted(on_disk - mapped)}"


def test_contributing_says_what_belongs_into_every_room() -> None:
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {
        name.strip("/") for name in rooms_on_disk()
    }


def test_paths_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (ROOT / link).exists(), f"README.md links to {link}, which is not there"


def test_tests_mirror_the_source() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    tested = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    tested |= {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    assert rooms - tested == set(), f"rooms without tests: {sorted(rooms - tested)}"


NO_OPS = {"to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous"}


def ends_in_a_cast(source: str) -> list[str]:
    """The autograd functions whose forward returns what may be its own operand."""
    found = []
    for kind in ast.walk(ast.parse(source)):
        if isinstance(kind, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in kind.bases):
            for part in ast.walk(next(m for m in kind.body if isinstance(m, ast.FunctionDef) and m.name == "forward")):
                value = part.value if isinstance(part, ast.Return) else None
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in NO_OPS:
                    found.append(kind.name)
    return found


def test_no_autograd_function_ends_in_a_cast_that_may_do_nothing() -> None:
    """torch 2.11 compiles such a forward to zero gradients where the cast does nothing, without a word."""
    assert ends_in_a_cast("class F(torch.autograd.Function):\n    def forward(x):\n        return x.to(x.dtype)") == [
        "F"
    ]
    assert {p.name: found for p in PACKAGE.rglob("*.py") if (found := ends_in_a_cast(p.read_text()))} == {}


def test_every_extra_that_a_message_names_exists_and_can_be_copied() -> None:
    """As `pip install 'loka[extra]'`, in quotes: some shells read the brackets as a pattern."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"loka\[([a-z,]+)\]", text)
        assert set(",".join(named).split(",")) - {""} <= set(extras), path
        assert len(named) == len(re.findall(r"pip install 'loka\[[a-z,]+\]'", text)), path


def test_everything_that_is_no_python_is_packaged() -> None:
    """An installed loka without one of these files would fail far from its cause."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = settings["tool"]["setuptools"]["package-data"]["loka"]
    files = [p.relative_to(PACKAGE) for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}]
    assert files
    for file in files:
        assert any(file.match(pattern) for pattern in packaged), file
