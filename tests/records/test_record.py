"""Records: what is written reads back equal, and every damage is either harmless or named."""

import copy
import json
import math
import os
import random
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from safetensors.numpy import save_file

from loka.records import (
    Point,
    ProbeReport,
    Record,
    RecordError,
    Run,
    capture_environment,
    from_json,
    load,
    replacing,
    save,
    to_json,
    write_atomically,
)

from .examples import KINDS, example_of, records


def is_sealed(kind: type[Record]) -> bool:
    """Whether files of this kind carry a digest, so that no change of meaning goes unseen."""
    return "seal" in kind.__struct_fields__


every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
Path_ = tuple[str | int, ...]


def nodes(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every value inside a JSON document, with the way to it."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nodes(item, (*path, key))


def changed(document: Any, path: Path_, change: Any) -> bytes:
    """The document as JSON, after `change(container, key)`."""
    document = copy.deepcopy(document)
    container = document
    for key in path[:-1]:
        container = container[key]
    change(container, path[-1])
    return json.dumps(document).encode()


def spelled(path: Path_) -> str:
    return "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def is_named(path: Path_, message: str) -> bool:
    """Whether a message has the way to a value; msgspec's word for some value of a mapping is [...]."""
    steps = [rf"\[{key}\]" if isinstance(key, int) else rf"(?:\.{re.escape(key)}|\[\.\.\.\])" for key in path]
    return re.search(r"\$" + "".join(steps), message) is not None


def test_there_are_kinds_to_test() -> None:
    assert {"Plan", "ProbeReport", "Run", "Comparison"} <= {kind.__name__ for kind in KINDS}
    assert len({kind.__struct_config__.tag for kind in KINDS}) == len(KINDS)


class TestRoundTrip:
    @every_kind
    def test_any_instance(self, kind: type[Record]) -> None:
        @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
        @given(records(kind))
        def check(record: Record) -> None:
            line = to_json(record)
            assert b"\n" not in line
            assert from_json(line, kind) == record
            assert to_json(from_json(line, kind)) == line
            assert from_json(line.decode(), kind) == record

        check()

    @every_kind
    def test_files(self, kind: type[Record], tmp_path: Path) -> None:
        record = example_of(kind)
        save(record, tmp_path / "new" / "folder" / "record.json")
        assert load(tmp_path / "new" / "folder" / "record.json", kind) == record
        text = (tmp_path / "new" / "folder" / "record.json").read_text()
        assert text.startswith('{\n "kind": ')
        assert text.endswith("}\n")

    @every_kind
    def test_a_file_says_what_it_is(self, kind: type[Record]) -> None:
        document = json.loads(to_json(example_of(kind)))
        assert document["kind"] == kind.__struct_config__.tag
        assert document["schema"] == kind.SCHEMA

    @every_kind
    def test_records_are_frozen(self, kind: type[Record]) -> None:
        with pytest.raises(AttributeError):
            example_of(kind).schema = 2


class TestStrictReading:
    @every_kind
    def test_a_wrong_type_anywhere_is_named(self, kind: type[Record]) -> None:
        document = json.loads(to_json(example_of(kind)))
        checked = 0
        for path, _ in nodes(document):
            if not path or path[0] in ("kind", "schema"):
                continue
            data = changed(document, path, lambda container, key: container.__setitem__(key, {"wrong": [[]]}))
            with pytest.raises(RecordError, match=r"^file\.json: ") as caught:
                from_json(data, kind, source="file.json")
            assert is_named(path, str(caught.value)), (path, str(caught.value))
            checked += 1
        assert checked > 5

    @every_kind
    def test_an_unknown_field_anywhere_is_named(self, kind: type[Record]) -> None:
        document = json.loads(to_json(example_of(kind)))
        open_mappings = {
            "metrics",
            "settings",
            "by_kind",
            "codes",
            "options",
            "latency_ms",
            "shed_ms",
            "send_lag_ms",
            "converted",
            "kept",
            "magnitudes",
            "alone",
            "wrong_chains",
            "kernels",
        }  # mappings of anything, not structs
        for path, value in nodes(document):
            if not isinstance(value, dict) or (path and path[-1] in open_mappings):
                continue
            data = changed(document, (*path, "surprise"), lambda container, key: container.__setitem__(key, 1))
            with pytest.raises(RecordError, match=r"^file\.json: .*unknown field `surprise`") as caught:
                from_json(data, kind, source="file.json")
            assert not path or is_named(path, str(caught.value))

    @every_kind
    def test_a_missing_field_anywhere_is_named_or_has_a_default(self, kind: type[Record]) -> None:
        document = json.loads(to_json(example_of(kind)))
        refused = 0
        for path, _ in nodes(document):
            if not path or isinstance(path[-1], int):
                continue
            data = changed(document, path, lambda container, key: container.__delitem__(key))
            try:
                record = from_json(data, kind, source="file.json")
            except RecordError as error:
                assert str(error).startswith("file.json: ")  # noqa: PT017 - fields with a default do load
                named = f"`{path[-1]}`" in str(error) or "both operands" in str(error)
                assert named or (is_sealed(kind) and "does not match its seal" in str(error))  # noqa: PT017
                refused += 1
            else:
                assert from_json(to_json(record), kind) == record
        assert refused >= len(kind.__struct_fields__) - 3

    @pytest.mark.parametrize(
        ("value", "word"), [(1.5, "int"), (True, "int"), ("1", "int"), (None, "int"), (1e400, "JSON")], ids=str
    )
    def test_an_integer_is_an_integer(self, value: Any, word: str) -> None:
        data = json.dumps({**json.loads(to_json(example_of(Run))), "seed": value}).replace("Infinity", "1e400")
        with pytest.raises(RecordError, match=word):
            from_json(data, Run)

    @pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
    def test_json_of_other_dialects_is_refused(self, word: str) -> None:
        data = to_json(example_of(Run)).replace(b'"seconds":0.25', b'"seconds":' + word.encode())
        with pytest.raises(RecordError, match=r"x\.json: not valid JSON"):
            from_json(data, Run, source="x.json")

    def test_a_field_given_twice_is_named(self) -> None:
        data = to_json(example_of(Run)).replace(b'"seed":1', b'"seed":1,"seed":2')
        with pytest.raises(RecordError, match=r"x\.json: field `seed` is given 2 times in one object"):
            from_json(data, Run, source="x.json")

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            ({"kind": "plan"}, r"x: field `kind` is 'plan', expected 'run'"),
            ({"kind": None}, r"x: field `kind` is None, expected 'run'"),
            ({"schema": 2}, r"x: field `schema` is 2, this loka reads 1; written by a newer loka; upgrade"),
            ({"schema": 0}, r"x: field `schema` is 0, this loka reads 1; make it again"),
            ({"schema": True}, r"x: field `schema` is True, this loka reads 1"),
            ({"schema": "1"}, r"x: field `schema` is '1', this loka reads 1"),
            ({"schema": 1.0}, r"x: field `\$.schema`: Expected `int`, got `float`"),
        ],
    )
    def test_another_kind_or_schema_is_refused(self, header: dict[str, Any], message: str) -> None:
        data = json.dumps({**json.loads(to_json(example_of(Run))), **header})
        with pytest.raises(RecordError, match=message):
            from_json(data, Run, source="x")

    @pytest.mark.parametrize("missing", ["kind", "schema"])
    def test_a_file_without_header_is_refused(self, missing: str) -> None:
        document = json.loads(to_json(example_of(Run)))
        del document[missing]
        with pytest.raises(RecordError, match=f"field `{missing}` is None"):
            from_json(json.dumps(document), Run)

    @pytest.mark.parametrize("data", ["[]", "null", "3", '"text"', "true"])
    def test_something_else_than_an_object(self, data: str) -> None:
        with pytest.raises(RecordError, match="expected a JSON object, got"):
            from_json(data, Run)

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b" ",
            b"\xef\xbb\xbf{}",
            b"\xff\xfe",
            b'{"kind": "\xff"}',
            b'{"a": "\\ud800"}',
            "{\ud800}",
            b"{'kind': 'run'}",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"a": ' + b"9" * 5000 + b"}",
            b"\x00" * 64,
        ],
        ids=range(12),
    )
    def test_garbage(self, data: bytes | str) -> None:
        with pytest.raises(RecordError, match=r"^x\.json: not valid JSON .*truncated or damaged"):
            from_json(data, Run, source="x.json")

    def test_a_value_that_breaks_a_rule_is_named(self) -> None:
        document = json.loads(to_json(example_of(ProbeReport)))
        interval = next(path for path, value in nodes(document) if isinstance(value, dict) and "low" in value)
        data = changed(document, (*interval, "low"), lambda container, key: container.__setitem__(key, 9.0))
        with pytest.raises(RecordError, match="does not contain its value") as caught:
            from_json(data, ProbeReport)
        assert spelled(interval) in str(caught.value)

    def test_missing_files_and_folders(self, tmp_path: Path) -> None:
        with pytest.raises(RecordError, match=r"nowhere\.json: cannot be read: No such file"):
            load(tmp_path / "nowhere.json", Run)
        with pytest.raises(RecordError, match="cannot be read: Is a directory"):
            load(tmp_path, Run)


class TestDamage:
    @every_kind
    def test_truncation_at_every_byte(self, kind: type[Record], tmp_path: Path) -> None:
        save(example_of(kind), tmp_path / "record.json")
        data = (tmp_path / "record.json").read_bytes()
        for length in range(len(data) - 1):  # the last byte is a newline
            with pytest.raises(RecordError, match=r"^cut\.json: not valid JSON"):
                from_json(data[:length], kind, source="cut.json")
        assert from_json(data[:-1], kind) == example_of(kind)

    @every_kind
    def test_random_mutations_load_or_are_named(self, kind: type[Record]) -> None:
        data = to_json(example_of(kind))
        dice = random.Random(7)
        outcomes = {"loaded": 0, "refused": 0}
        for _ in range(1500):
            mutant = mutate(data, dice)
            try:
                record = from_json(mutant, kind, source="some/file.json")
            except RecordError as error:
                assert str(error).startswith("some/file.json: ")  # noqa: PT017 - some mutants do load
                outcomes["refused"] += 1
            else:
                assert from_json(to_json(record), kind) == record
                assert to_json(from_json(to_json(record), kind)) == to_json(record)
                assert not is_sealed(kind) or record == example_of(kind)
                outcomes["loaded"] += 1
        assert outcomes["refused"] > 500, outcomes
        assert outcomes["loaded"] > (0 if is_sealed(kind) else 20), (
            outcomes
        )  # a digit or a letter of a text: still a record


def mutate(data: bytes, dice: random.Random) -> bytes:
    """One to three small damages: a flipped bit, a byte replaced, removed or inserted, a piece lost, doubled or moved."""
    damaged = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        at, length = dice.randrange(len(damaged)), dice.randrange(1, 12)
        match dice.randrange(7):
            case 0:
                damaged[at] ^= 1 << dice.randrange(8)
            case 1:
                damaged[at] = dice.choice(b'0123456789abc{}[]":,.-eE \\n')
            case 2:
                del damaged[at]
            case 3:
                damaged.insert(at, dice.randrange(256))
            case 4:
                del damaged[at : at + length]
            case 5:
                damaged[at:at] = damaged[at : at + length]
            case 6:
                piece = damaged[at : at + length]
                del damaged[at : at + length]
                to = dice.randrange(len(damaged))
                damaged[to:to] = piece
    return bytes(damaged)


class TestWriting:
    def bad(self, **fields: Any) -> Run:
        return msgspec.structs.replace(example_of(Run), **fields)

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
    def test_numbers_that_are_not_finite_are_refused_by_path(self, number: float) -> None:
        cases = {
            "run.seconds": self.bad(seconds=number),
            "run.metrics['auc']": self.bad(metrics={"loss": 1.0, "auc": number}),
            "run.curve[1].loss": self.bad(curve=[Point(step=1, loss=1.0), Point(step=2, loss=number)]),
        }
        for path, record in cases.items():
            with pytest.raises(RecordError) as caught:
                to_json(record)
            assert str(caught.value).startswith(f"{path} is {number}; records hold finite numbers, and None for")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"seed": "one"}, r"run: field `\$.seed`: Expected `int`, got `str`"),
            ({"seed": 1.5}, r"run: field `\$.seed`: Expected `int`, got `float`"),
            ({"name": None}, r"run: field `\$.name`: Expected `str`, got `null`"),
            ({"curve": [1]}, r"run: field `\$.curve\[0\]`: Expected `object`, got `int`"),
            ({"name": object()}, r"run: cannot be written: .*object"),
            ({"name": "\ud800"}, r"run: cannot be written: .*surrogates"),
        ],
        ids=range(6),
    )
    def test_what_could_not_be_read_back_is_not_written(
        self, fields: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "run.json"
        save(example_of(Run), path)
        with pytest.raises(RecordError, match=message):
            save(self.bad(**fields), path)
        assert load(path, Run) == example_of(Run)

    @pytest.mark.parametrize("function", ["fsync", "replace"])
    def test_a_failure_leaves_the_old_file(self, function: str, tmp_path: Path, monkeypatch) -> None:
        path = tmp_path / "run.json"
        save(example_of(Run), path)
        before = path.read_bytes()

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, function, fail)
        with pytest.raises(OSError, match=r"No space left on device: '.*/run\.json'"):
            save(self.bad(seed=9), path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["run.json"]  # nothing half-written lies about

    def test_an_interrupt_leaves_the_old_file(self, tmp_path: Path, monkeypatch) -> None:
        save(example_of(Run), tmp_path / "run.json")

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(self.bad(seed=9), tmp_path / "run.json")
        assert load(tmp_path / "run.json", Run).seed == 1
        assert os.listdir(tmp_path) == ["run.json"]

    def test_the_data_is_on_disk_before_the_name_is(self, tmp_path: Path, monkeypatch) -> None:
        order: list[str] = []
        for name in ("fsync", "replace"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (order.append(name), real(*a))[1])
        save(example_of(Run), tmp_path / "run.json")
        assert order == ["fsync", "replace"]

    def test_permissions_follow_the_umask_and_then_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        old = os.umask(0o022)
        try:
            write_atomically(path, b"1")
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
            path.chmod(0o640)
            write_atomically(path, b"2")
            weights = tmp_path / "weights.safetensors"
            with replacing(weights) as temporary:
                save_file({"a": np.ones(3)}, temporary)
        finally:
            os.umask(old)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert path.read_bytes() == b"2"
        assert stat.S_IMODE(weights.stat().st_mode) == 0o644

    def test_a_disk_that_cannot_take_tensors_is_named_as_any_other(self, tmp_path: Path) -> None:
        weights = tmp_path / "weights.safetensors"
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with (
                pytest.raises(OSError, match=r"File too large: '.*/weights\.safetensors'"),
                replacing(weights) as temporary,
            ):
                save_file({"a": np.ones(1000)}, temporary)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not os.listdir(tmp_path)

    def test_a_symbolic_link_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real.json").write_bytes(b"1")
        (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
        write_atomically(tmp_path / "link.json", b"2")
        assert (tmp_path / "link.json").is_symlink()
        assert (tmp_path / "real.json").read_bytes() == b"2"

    def test_a_folder_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").mkdir()
        with pytest.raises(OSError, match=r"Is a directory: '[^']*/run\.json'$"):
            write_atomically(tmp_path / "run.json", b"1")
        assert os.listdir(tmp_path) == ["run.json"]


def test_a_new_schema_refuses_the_old_one_and_the_other_way_round() -> None:
    class Old(Record, frozen=True, tag="versioned"):
        value: int

    class New(Record, frozen=True, tag="versioned", kw_only=True):
        SCHEMA: ClassVar[int] = 2
        schema: int = 2
        value: int

    assert from_json(to_json(New(value=1)), New) == New(value=1)
    with pytest.raises(RecordError, match="field `schema` is 1, this loka reads 2; make it again"):
        from_json(to_json(Old(value=1)), New)
    with pytest.raises(RecordError, match="field `schema` is 2, this loka reads 1; written by a newer loka; upgrade"):
        from_json(to_json(New(value=1)), Old)
    with pytest.raises(ValueError, match="schema 1 of New is not 2"):
        New(schema=1, value=1)


def test_records_import_neither_torch_nor_numpy() -> None:
    code = "import sys, loka.records; print(sorted({'torch', 'numpy', 'triton', 'polars'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_command_is_recorded_without_the_folders_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/a/b/tune.py", "--out", "/home/me/x.json", "--plan=/home/me/p.json", "runs/x", "a=b"])  # fmt: skip
    assert capture_environment().command == "tune.py --out x.json --plan=p.json runs/x a=b"
