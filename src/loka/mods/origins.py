"""Find out on an example how the inputs of some modules are made, and let these ask for it in compiled code (`loka.lowp.origins`)."""

import sys
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from loka.lowp.origins import ORIGINS, SEEN, Joined, Origin, Origins, SeesOrigins
from loka.mods.calling import run_example
from loka.mods.editor import Editor
from loka.nn.sharing import Watch
from loka.nn.writing import version_of


class Found(NamedTuple):
    """How the input of a module was made on an example."""

    origin: Origin
    holder: str  # the innermost module whose forward makes the input and calls the module


class _Noting(Origins):
    """Records origins while an example runs in eager mode, with the modules that were running then, and versions."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running = running  # the modules whose forwards run right now, the outermost first
        self.places: list[tuple[Tensor, list[str], list[tuple[Tensor, int]]]] = []

    def forget(self) -> None:
        """Keep what was recorded: versions tell what was written to."""

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a tensor's origin, where it was made, and the versions of what it was made from."""
        origin = self.read(func, args, kwargs, out)
        if origin is None:
            return
        source = args[0] if args else kwargs.get("input")
        read = [out, *(origin.parts if isinstance(origin, Joined) else (origin.x,))]
        place, versions = list(self.running), [(tensor, version_of(tensor)) for tensor in read]
        for tensor, where, then in self.places:
            if tensor is source:  # an activation or dropout: what its input was made from must not have changed since
                place, versions = _common(place, where), [*versions, *then]
        self.made.append((out, origin, ""))
        self.places.append((out, place, versions))

    def find_unchanged(self, x: Any) -> tuple[Origin, list[str]] | None:
        """Return a tensor's origin and the modules that ran since it was made, unless what it was made from has changed."""
        for (tensor, origin, _), (_, place, read) in zip(reversed(self.made), reversed(self.places), strict=True):
            if tensor is x:
                same = all(version_of(t) == version for t, version in read)
                return (origin, _common(place, self.running)) if same else None
        return None


def _common(one: list[str], other: list[str]) -> list[str]:
    """Return what two lists begin with."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count]


def tell_origins(editor: Editor, name: str, holder: str, seen: dict[str, Origins]) -> None:
    """Let a module ask how its input was made.

    Args:
        editor: the model's editor. The mod then reports the change.
        name: of the module.
        holder: of the module that contains it and what makes its input (`Found.holder`).
        seen: what holders remember already, by their names; added to.
    """
    if holder not in seen:
        before = editor.model.get_submodule(holder).__dict__.get(SEEN, ())
        if before:
            seen[holder] = before[0]
        else:
            seen[holder] = Origins()
            editor.mix(holder, SeesOrigins, **{SEEN: (seen[holder],)})
    editor.mark(name, ORIGINS, seen[holder])


def find_origins(editor: Editor, names: list[str]) -> dict[str, Found]:
    """Run the example, and find how the inputs of some modules are made.

    Args:
        editor: the model's editor. If the example fails, the reason is reported here.
        names: of modules that take one tensor.

    Returns:
        What was found, by the name of the module. Modules that are called more than once are not in it, nor are those
        whose holder runs in a checkpoint: a compiler lets nothing in there change what is outside.
    """
    if editor.example is None or not names:
        return {}
    running: list[str] = []
    noting = _Noting(running)
    calls: dict[str, list[tuple[Origin, list[str]] | None]] = {name: [] for name in names}
    checkpointed: set[str] = set()

    def enter(name: str, args: Any) -> None:
        if name in calls:
            calls[name].append(noting.find_unchanged(args[0] if args else None))
        if _runs_in_checkpoint():
            checkpointed.add(name)

    if not run_example(editor, Watch([noting]), running, enter):
        return {}
    found = {}
    for name, seen in calls.items():
        if len(seen) == 1 and seen[0] is not None:
            origin, around = seen[0]
            if around and around[-1] not in checkpointed:
                found[name] = Found(origin, around[-1])
    return found


def _runs_in_checkpoint() -> bool:
    """Check whether a checkpoint is among the callers; without gradients it leaves no other trace."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None
