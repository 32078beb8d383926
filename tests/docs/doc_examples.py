"""The examples in the docstrings of exported names and in pages of the manual: how they are found, checked and run.

An example may use the names of its room, those of `loka`, a few of torch's, and stand-ins, which are what a
reader has at hand (test_doc_examples.py): a model, batches, a plan, a report. Other rooms' names are written out (`loka.dispatch.recipe_named`).
"""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loka

NUMBERS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Documented:
    """An exported name with the lines of its example."""

    name: str
    room: str
    lines: tuple[doctest.Example, ...]

    @property
    def run(self) -> bool:
        return not any(line.options.get(doctest.SKIP) for line in self.lines)


def documented() -> Iterator[Documented]:
    """Every function and class that `loka` or a room exports and whose docstring has an example, once."""
    seen: set[int] = set()
    rooms = ["loka", *(f"loka.{found.name}" for found in pkgutil.iter_modules(loka.__path__) if found.ispkg)]
    for room in rooms:
        module = importlib.import_module(room)
        for name in module.__all__:
            each = getattr(module, name)
            if id(each) in seen or not (inspect.isfunction(each) or inspect.isclass(each)):
                continue
            seen.add(id(each))
            if lines := doctest.DocTestParser().get_examples(inspect.getdoc(each) or ""):
                yield Documented(f"{room}.{name}", room, tuple(lines))


def blocks_of(page: Path) -> Iterator[Documented]:
    """The Python of a page of the manual, block by block."""
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
        with contextlib.suppress(SyntaxError):  # signatures, as in the page about kernels
            ast.parse(block)
            yield Documented(f"{page.name} {number}", "loka", (doctest.Example(block, ""),))


def names_for(room: str) -> dict[str, Any]:
    """What an example of this room may use without saying where it is from, stand-ins aside."""
    import torch
    import torch.nn.functional as functional

    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": functional, "Path": Path, "loka": loka}
    for module in ("loka", room):
        found = importlib.import_module(module)
        names |= {name: getattr(found, name) for name in found.__all__}
    return names


def wrong_calls(example: Documented) -> list[str]:
    """Calls whose arguments do not fit the signature, as far as what is called is known without running the example."""
    names, wrong = names_for(example.room), []
    parsed = ast.parse("".join(line.source for line in example.lines))
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import | ast.ImportFrom):
            try:
                exec(ast.unparse(node), names)
            except ModuleNotFoundError as error:  # an optional library; loka's own modules are there
                if (error.name or "").startswith("loka"):
                    wrong.append(str(error))
            except ImportError as error:
                wrong.append(str(error))
    for node in ast.walk(parsed):
        if not isinstance(node, ast.Call) or not re.fullmatch(r"[\w.]+", ast.unparse(node.func)):
            continue
        try:
            called = eval(ast.unparse(node.func), dict(names))
            signature = inspect.signature(called)
        except (NameError, ValueError, TypeError):  # a stand-in, or what has no signature
            continue
        except AttributeError as error:
            wrong.append(f"{ast.unparse(node.func)}: {error}")
            continue
        if any(isinstance(word, ast.Starred) for word in node.args) or any(word.arg is None for word in node.keywords):
            continue
        try:
            signature.bind(*node.args, **{word.arg: word.value for word in node.keywords if word.arg})
        except TypeError as error:
            wrong.append(f"{ast.unparse(node.func)}: {error}")
    return wrong


def run(example: Documented, world: dict[str, Any]) -> list[str]:
    """Run an example and return what differs from what it shows. Values that depend on stand-ins need only have the shown type."""
    names, differs = names_for(example.room) | world, []
    for line in example.lines:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(line.source, example.name, "single"), names)
        if line.want and not doctest.OutputChecker().check_output(line.want, said.getvalue(), NUMBERS):
            used = {
                node.id
                for each in example.lines
                for node in ast.walk(ast.parse(each.source))
                if isinstance(node, ast.Name)
            }
            if not used & set(world) or _kind(line.want) is not _kind(said.getvalue()):
                differs.append(
                    f"{line.source.strip()}: {said.getvalue().strip()!r}, the example says {line.want.strip()!r}"
                )
    return differs


def _kind(text: str) -> type:
    try:
        return type(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError):
        return str
