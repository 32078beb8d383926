"""Importing loka is free: no torch, no CUDA, no optional library, no environment variable, and quick."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "triton", "polars", "sklearn", "msgspec", "safetensors", "rich", "typer", "vl_convert")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_imports_nothing_heavy() -> None:
    code = f"import sys, loka\nprint(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert run(code) == "[]"


def test_it_is_quick() -> None:
    """CPU time of the import alone, the best of three processes: a busy machine does not count against it."""
    code = "import time\nstart = time.process_time()\nimport loka\nprint(time.process_time() - start)"
    assert min(float(run(code)) for _ in range(3)) < 0.1


@pytest.fixture(scope="module")
def touched() -> list[str]:
    """What is imported after every public name was asked for, and whether CUDA was started, from one process."""
    code = (
        "import sys, loka\nfor name in loka.__all__: getattr(loka, name)\n"
        "for name in dir(loka): getattr(loka, name)\n"
        "print(*sorted(sys.modules))\nimport torch\nprint(torch.cuda.is_initialized())"
    )
    return run(code).splitlines()


def test_every_room_is_an_attribute() -> None:
    """All but the command line: `loka.comms` works after `import loka`, and completion offers it."""
    code = (
        "import pkgutil, loka\nrooms = {found.name for found in pkgutil.iter_modules(loka.__path__) if found.ispkg}\n"
        "print(sorted(rooms - set(dir(loka))))"
    )
    assert run(code) == "['cli']"


def test_the_public_names_start_no_cuda(touched: list[str]) -> None:
    assert touched[1] == "False"


def test_it_reads_and_changes_no_environment_variable() -> None:
    code = (
        "import os\nbefore = dict(os.environ)\nseen = []\n"
        "class Watched(type(os.environ)):\n"
        "    def __getitem__(self, key):\n        seen.append(key)\n        return super().__getitem__(key)\n"
        "os.environ.__class__ = Watched\nimport loka\nassert dict(os.environ) == before\n"
        "print([key for key in seen if key not in before])"
    )
    assert run(code) == "[]"


def test_optional_libraries_wait_until_they_are_needed(touched: list[str]) -> None:
    optional = (
        "deep_gemm",
        "fbgemm_gpu",
        "torchao",
        "transformer_engine",
        "polars",
        "sklearn",
        "vl_convert",
        "tensorboard",
    )
    imported = touched[0].split()
    assert "loka" in imported
    assert not set(optional) & set(imported)


def test_nothing_undeclared_is_imported_at_module_level() -> None:
    """A dependency of a dependency may be gone tomorrow: what is imported at module level is declared in pyproject.toml."""
    import ast
    import tomllib
    from pathlib import Path

    root = Path(__file__).resolve().parent.parent
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    allowed = {line.split(">")[0].split("=")[0].strip().replace("-", "_") for line in declared} | {"loka"}
    found: dict[str, str] = {}
    for path in (root / "src" / "loka").rglob("*.py"):
        own = allowed | ({"triton"} if path.name.startswith("triton_") or path.name == "tile.py" else set())
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top not in own:
                    found[top] = str(path.relative_to(root))
    assert not found, found
