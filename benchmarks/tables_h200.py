"""Embedding tables and the wire on one GPU: pooled lookups, fused updates, packing, proved right and then timed, beside torch's embedding_bag and the bandwidth of a copy.

    PYTHONPATH=src python benchmarks/tables_h200.py --seconds 60 --out tables.json
    PYTHONPATH=src python benchmarks/tables_h200.py --only lookups,wire --seconds 40 --out some.json   some of it
    PYTHONPATH=src python benchmarks/tables_h200.py --sweep --seconds 60 --out tiles.json              other tiles than the kernels choose
    PYTHONPATH=src TRITON_INTERPRET=1 python benchmarks/tables_h200.py --smoke --out tables.json       CPU, tiny: does it run?

10 M rows, 65,536 bags of 20 items, widths 32 to 256. Items are drawn uniformly, and by Zipf's law: the row of rank r with a probability proportional to 1 / r, ranks in random order.
Every kernel is compared with the law first, on the tables that are then timed (lookups), on a small one (updates), to the
byte (packing); one that is red is named and not timed. All of a width are timed together with CUDA graphs, three sets of items in turn so that the cache helps no one.

    lookup   bytes: items x (sectors of 32 of a row + a byte for its scale) + indices + result
    update   `whole` is what a step runs: sort, bags, rows; `rows` is the fused kernel on a sorted batch
    wire     bytes read and written
    bars     for both draws: bf16 >= 80 % of the copy's bandwidth from width 128 on; 8 bits >= 65 % at 256; >= 2x F.embedding_bag everywhere; 8 bits over our bf16 >= 1.25x at 128, >= 1.5x at 256;
             an 8-bit update no slower than float32's, whole and rows; packing and unpacking of a wire codec >= 80 % of copy

What does not fit into the time is listed as skipped. The file is written again after every row. Exit 0 whatever the bars say: they are in the file.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import Draw
from loka.kernels.embedding_bag import Rows, reference, triton
from loka.kernels.embedding_bag.rows import fill_store
from loka.kernels.embedding_update import Rule
from loka.kernels.embedding_update import triton as update
from loka.kernels.wire.codec import parse_codec
from loka.measure import Conformance, Contender, snapshot, time_together
from loka.measure.adapter import adapter_for
from loka.measure.conformance import poisoned_allocations
from loka.records import write_atomically

LOOKUPS = ("bfloat16", "int8:row", "e4m3:row", "int4:row")
UPDATES = ("float32", "bfloat16", "int8:row", "e4m3:row:pow2")
WIRES = (
    ("e4m3:1x128:pow2", torch.bfloat16),
    ("e4m3:1x128:pow2", torch.float32),
    ("e4m3:1x128:pow2:stochastic", torch.bfloat16),
    ("e4m3:1x128:pow2:stochastic", torch.float32),
    ("e4m3:1x32:e8m0", torch.bfloat16),
    ("e5m2:1x32:e8m0", torch.bfloat16),
)
SWEPT = {"bfloat16": (8, 16), "int8:row": (4, 8)}  # items of a tile
SETS, SECTOR = 3, 32
RIGHT = Conformance(True, 0.0, 0.0)


class Session:
    """What is measured so far, the time left, and the file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.o, self.began = options, time.monotonic()
        self.device = torch.device("cpu" if options.smoke else "cuda")
        self.result: dict[str, Any] = {
            "environment": json.loads(msgspec.json.encode(snapshot())), "rows": options.rows, "bags": options.bags, "items": options.items,
            "lookups": [], "updates": [], "wire": [], "tiles": [], "refused": [], "skipped": [], "bars": [],
        }  # fmt: skip

    def late(self, what: str) -> bool:
        if time.monotonic() - self.began <= self.o.seconds:
            return False
        self.result["skipped"].append(what)
        return True

    def write(self) -> None:
        self.result["bars"] = judge(self.result)
        self.result["seconds"] = time.monotonic() - self.began
        write_atomically(self.o.out, (json.dumps(self.result, indent=1) + "\n").encode())

    def record(self, place: str, candidates: list[Contender], sizes: dict[str, int], **more: Any) -> None:
        """Time them together, and append a row for each."""
        if not candidates:
            return
        for timing in time_together(candidates, self.device, repeats=self.o.repeats):
            interval = timing.microseconds()
            share = sizes[timing.name] / (1e-6 * interval.value) / self.result["copy_bytes_per_second"]
            self.result[place].append({
                **more, "rows": timing.name, "microseconds": interval.value, "low": interval.low, "high": interval.high,
                "bytes": sizes[timing.name], "share_of_copy": share,
            })  # fmt: skip
            self.write()
        print(f"{place} {more}: {time.monotonic() - self.began:.1f} s", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--bags", type=int, default=65_536)
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--widths", default="256,128,64,32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="lookups,updates,wire,hot", help="what to time; hot: updates by Zipf's items")
    parser.add_argument("--sweep", action="store_true", help="try other tiles of lookups and packing instead")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, in Triton's interpreter")
    o = parser.parse_args()
    if o.smoke:
        o.rows, o.bags, o.items, o.widths, o.repeats = 200, 6, 3, "32", 3
    asked = o.only.split(",")
    if unknown := sorted(set(asked) - set(PARTS)):
        raise SystemExit(f"--only takes {', '.join(PARTS)}, not {', '.join(unknown)}")
    session = Session(o)
    session.result["copy_bytes_per_second"] = copy_bandwidth(session)
    for part in asked:
        for at, width in enumerate(int(width) for width in o.widths.split(",")):
            per_width, measure = PARTS[part][o.sweep]
            if measure is None or (not per_width and at) or session.late(f"{part} of width {width}"):
                continue
            measure(width, session)
    session.write()
    print(json.dumps(session.result["bars"], indent=1))
    return 0


def copy_bandwidth(session: Session) -> float:
    """Bytes read and written by a kernel that copies 1 GiB, per second. `copy_` in a CUDA graph is no kernel, and a third slower."""
    source = torch.randn(2**14 if session.o.smoke else 2**28, device=session.device)
    target = torch.empty_like(source)
    (timing,) = time_together([Contender("copy", [lambda: torch.neg(source, out=target)], RIGHT)], session.device, repeats=5)  # fmt: skip
    return 2 * source.nbytes / min(timing.seconds)


def proved(session: Session, what: str, check: Callable[[], str]) -> bool:
    """`check` says what is wrong, or nothing. A kernel that raises is as red as one that is wrong."""
    try:
        problem = check()
    except Exception as error:  # whatever a kernel may raise: the others are still measured
        problem = f"{type(error).__name__}: {error}"[:500]
    if problem:
        session.result["refused"].append(f"{what}: {problem}")
        session.write()
    return not problem


def draw(session: Session, how: str) -> tuple[list[Tensor], Tensor]:
    o, device = session.o, session.device
    generator, total = torch.Generator(device=device).manual_seed(0), o.bags * o.items
    if how == "zipf":
        shares = (1 / torch.arange(1, o.rows + 1, device=device, dtype=torch.float64)).cumsum(0)
        places = torch.randperm(o.rows, generator=generator, device=device)
        at = [torch.rand(total, generator=generator, device=device, dtype=torch.float64) for _ in range(SETS)]
        sets = [places[torch.searchsorted(shares, a * shares[-1]).clamp(max=o.rows - 1)] for a in at]
    else:
        sets = [torch.randint(0, o.rows, (total,), generator=generator, device=device) for _ in range(SETS)]
    return sets, torch.arange(0, total + 1, o.items, device=device)


def make_rows(kind: str, width: int, session: Session) -> Rows:
    """Made piece by piece: a float32 table of 10 M x 256 is 10 GB, and quantising it whole would take several times that."""
    o, device = session.o, session.device
    rows, generator = None, torch.Generator(device=device).manual_seed(1)
    for start in range(0, o.rows, 1_000_000):
        piece = torch.randn(min(1_000_000, o.rows - start), width, generator=generator, device=device) * 0.1
        part, spec = fill_store(piece, kind)
        made, end = Rows.in_store(part, spec, width), start + len(piece)
        if rows is None:
            shape = (o.rows * (part.numel() // len(piece)),) if part.dim() == 1 else (o.rows, part.shape[1])
            rows = Rows.in_store(part.new_empty(shape), spec, width)
        rows.data[start:end] = made.data
        if rows.scale_code is not None:
            rows.scale_code[start:end] = made.scale_code
    assert rows is not None
    return rows


def check_lookup(rows: Rows, indices: Tensor, offsets: Tensor) -> str:
    """Some bags, in bf16 as they are timed, with poisoned allocations: half a step of bf16 from the law, and float32's own error of a sum."""
    bags = min(512, len(offsets) - 1)
    given = indices[: int(offsets[bags])], offsets[: bags + 1]
    with poisoned_allocations():
        found = triton.run(rows, *given, out_dtype=torch.bfloat16).float()
    law = reference.run(rows, *given, out_dtype=torch.float32)
    step = 2.0**-8 if indices.is_cuda else 2.0**-7  # Triton's interpreter cuts bf16 off instead of rounding it
    allowed = step * law.abs() + 1e-5 * law.abs().amax(1, keepdim=True)
    worst = float(((found - law).abs() / allowed.clamp(min=1e-30)).max())
    return "" if worst <= 1 else f"off by {worst:.3g} times what is allowed"


def lookup_bytes(rows: Rows, o: argparse.Namespace) -> int:
    row = rows.data.shape[1] * rows.data.element_size()
    read = math.ceil(row / SECTOR) * SECTOR + (rows.scale_code is not None)
    return o.bags * o.items * (read + 8) + o.bags * rows.width * 2


def time_lookups(width: int, session: Session) -> None:
    tables = {kind: make_rows(kind, width, session) for kind in LOOKUPS}
    for how in ("uniform", "zipf"):
        if not session.late(f"{how} lookups of width {width}"):
            time_lookups_of(width, how, tables, session)


def time_lookups_of(width: int, how: str, tables: dict[str, Rows], session: Session) -> None:
    (sets, offsets), weight = draw(session, how), tables["bfloat16"].data
    torchs = [lambda i=i: F.embedding_bag(i, weight, offsets, mode="sum", include_last_offset=True) for i in sets]
    candidates = [Contender("F.embedding_bag", torchs, RIGHT)]
    sizes = {"F.embedding_bag": lookup_bytes(tables["bfloat16"], session.o)}
    for kind, rows in tables.items():
        check = lambda rows=rows: check_lookup(rows, sets[0], offsets)  # noqa: E731
        if proved(session, f"{how} lookup {kind} of width {width}", check):
            thunks = [lambda i=i, rows=rows: triton.run(rows, i, offsets, out_dtype=torch.bfloat16) for i in sets]
            candidates.append(Contender(kind, thunks, RIGHT))
            sizes[kind] = lookup_bytes(rows, session.o)
    session.record("lookups", candidates, sizes, width=width, drawn=how)


def sweep_tiles(width: int, session: Session) -> None:
    """Items of a tile around what the kernel chooses; one kind of rows after another."""
    from loka.kernels.embedding_bag import triton_kernels

    sets, offsets = draw(session, "uniform")
    for kind, tried in SWEPT.items():
        candidates, sizes = [], {}
        rows = make_rows(kind, width, session)
        chosen = triton_kernels.tile_of(width, rows.data.element_size())
        for items in sorted({chosen[0], *tried}):
            tile = (items, *chosen[1:])
            name = f"{kind} {'x'.join(map(str, tile))}{' (chosen)' * (tile == chosen)}"
            thunks = [
                lambda i=i, rows=rows, tile=tile: triton_kernels.look_up(
                    rows.data, rows.scale_code, None, None, i, offsets, None, False, False, torch.bfloat16, tile
                )
                for i in sets
            ]
            if not session.late(name):
                candidates.append(Contender(name, thunks, RIGHT))
                sizes[name] = lookup_bytes(rows, session.o)
        session.record("tiles", candidates, sizes, width=width)


def sweep_packing(width: int, session: Session) -> None:
    """Elements and warps of a program that packs, beside what the kernel chooses."""
    from loka.kernels.wire import triton_kernels

    elements = 2**14 if session.o.smoke else 2**27
    for spelling, dtype in WIRES:
        codec, name = parse_codec(spelling), f"{spelling} {str(dtype).removeprefix('torch.')}"
        if session.late(f"tiles of {name}"):
            continue
        now = Draw(1, 2, 3) if codec.is_stochastic else None
        sets = [torch.randn(elements, device=session.device).to(dtype).view(-1, codec.block) for _ in range(2)]
        candidates, sizes = [], {}
        for tile in (None, (1024, 1), (2048, 1), (2048, 2), (4096, 2), (4096, 4), (8192, 4)):
            key = f"pack {name} {'chosen' if tile is None else 'x'.join(map(str, tile))}"
            thunks = [lambda x=x, tile=tile, codec=codec, now=now: triton_kernels.pack(x, codec.spec, now, 0, tile=tile) for x in sets]  # fmt: skip
            candidates.append(Contender(key, thunks, RIGHT))
            sizes[key] = elements * dtype.itemsize + codec.size(elements)
        session.record("tiles", candidates, sizes)


def check_update(kind: str, width: int, session: Session) -> str:
    adapter = adapter_for("embedding_update")
    shape = (6, width, 50) if session.o.smoke else (512, width, 5000)
    (call,) = adapter.calls([shape], [f"{kind}|rowwise_adagrad|items={session.o.items}"])
    operands = adapter.operands(call, seed=1, distribution="normal", device=session.device)
    verdict: Conformance = adapter.check(update, call, operands)
    return verdict.reason


def time_updates(width: int, session: Session) -> None:
    time_updates_of(width, "uniform", UPDATES, session)


def time_hot_updates(width: int, session: Session) -> None:
    """With Zipf's items one row has 6 % of them all."""
    time_updates_of(width, "zipf", UPDATES, session)


def time_updates_of(width: int, how: str, kinds: Sequence[str], session: Session) -> None:
    from loka.kernels.embedding_update import triton_kernels

    o, rule, now, (sets, offsets) = session.o, Rule("rowwise_adagrad", lr=0.01), Draw(1, 2, 3), draw(session, how)
    grad = torch.randn(o.bags, width, device=session.device)
    ordered = [update.sort_items(i, offsets, None, "sum", o.rows) for i in sets]
    candidates, sizes = [], {}
    for kind in kinds:
        if not proved(session, f"update {kind} of width {width}", lambda kind=kind: check_update(kind, width, session)):
            continue
        rows = make_rows(kind, width, session)
        args = (grad, rule, rule.state(rows), now)
        whole = [lambda i=i, rows=rows, args=args: update.run(rows, i, offsets, *args) for i in sets]
        alone = [lambda i=i, rows=rows, args=args: triton_kernels.update(rows, *i, *args, 0, 0) for i in ordered]
        read = (math.ceil(width * rows.data.element_size() / SECTOR) + 1) * SECTOR + (rows.scale_code is not None)
        for name, thunks in ((f"{kind} whole", whole), (f"{kind} rows", alone)):
            candidates.append(Contender(name, thunks, RIGHT))
            sizes[name] = o.bags * o.items * (2 * read + 8) + o.bags * width * 4
    session.record("updates", candidates, sizes, width=width, drawn=how)


def check_wire(spelling: str, dtype: torch.dtype, device: torch.device) -> str:
    """Bytes and values of the law, with NaN, infinities, zeros and subnormals, for counts that fill no tile."""
    codec = parse_codec(spelling)
    now = Draw(1, 2, 3) if codec.is_stochastic else None
    generator = torch.Generator(device=device).manual_seed(2)
    for count in (2**14, 2**14 - codec.block, 2**14 - 2 * codec.block - 5, 3 * codec.block):
        x = torch.randn(count, generator=generator, device=device) * torch.logspace(-12, 6, count, device=device)
        x = x[torch.randperm(count, generator=generator, device=device)]
        x[5::97], x[7::131], x[11::89], x[13::203] = 0.0, -0.0, 1e-30, -1e-42
        x[17::1001], x[19::1003], x[23::1009], x[29::1013] = math.nan, math.inf, -math.inf, -math.nan
        x = x.to(dtype)
        law, found = codec._encode_blocks(x, now, 3), codec.encode(x, draw=now, first_block=3)
        if not torch.equal(found, law):
            return f"{int((found != law).sum())} of {len(law)} bytes differ"
        if device.type == "cpu" and spelling.startswith("e5m2"):  # the interpreter reads its NaN as a number
            law = codec._encode_blocks(x.nan_to_num(), now, 3)
        values = codec._decode_blocks(law, count, dtype)
        if not torch.equal(codec.decode(law, count, dtype).nan_to_num(1e-3), values.nan_to_num(1e-3)):
            return "unpacked values differ"
    return ""


def time_wire(width: int, session: Session) -> None:
    elements = 2**14 if session.o.smoke else 2**27
    candidates, sizes = [], {}
    for spelling, dtype in WIRES:
        codec, name = parse_codec(spelling), f"{spelling} {str(dtype).removeprefix('torch.')}"
        if not proved(session, f"wire {name}", lambda s=spelling, d=dtype: check_wire(s, d, session.device)):
            continue
        now = Draw(1, 2, 3) if codec.is_stochastic else None
        sets = [torch.randn(elements, device=session.device).to(dtype) for _ in range(2)]
        packed = [codec.encode(x, draw=now) for x in sets]
        packs = [lambda x=x, codec=codec, now=now: codec.encode(x, draw=now) for x in sets]
        unpacks = [lambda p=p, codec=codec, dtype=dtype: codec.decode(p, elements, dtype) for p in packed]
        for way, thunks in (("pack", packs), ("unpack", unpacks)):
            candidates.append(Contender(f"{way} {name}", thunks, RIGHT))
            sizes[f"{way} {name}"] = elements * dtype.itemsize + codec.size(elements)
    session.record("wire", candidates, sizes)


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every bar that was measured: what was seen, what was wanted, whether it holds."""
    look = {(r["width"], r["drawn"], r["rows"]): r for r in result["lookups"]}
    move = {(r["width"], r["drawn"], r["rows"]): r for r in result["updates"]}
    bars: list[dict[str, Any]] = []

    def bar(what: str, seen: float, least: float) -> None:
        bars.append({"bar": what, "seen": round(seen, 3), "least": least, "holds": seen >= least})

    def faster(rows: dict[tuple[int, str, str], Any], width: int, how: str, kind: str, than: str) -> float | None:
        if (width, how, than) not in rows:
            return None
        return float(rows[width, how, than]["microseconds"] / rows[width, how, kind]["microseconds"])

    for (width, how, kind), row in look.items():
        drawn = ", Zipf" * (how == "zipf")
        if kind == "bfloat16" and width >= 128 and not drawn:  # with Zipf's, most rows come from the cache
            bar(f"bf16 lookup of width {width}, share of copy", row["share_of_copy"], 0.8)
        if kind in ("int8:row", "e4m3:row") and width == 256 and not drawn:
            bar(f"{kind} lookup of width 256, share of copy", row["share_of_copy"], 0.65)
        over = faster(look, width, how, kind, "F.embedding_bag")
        if kind != "F.embedding_bag" and over is not None:
            bar(f"{kind} lookup of width {width} over F.embedding_bag{drawn}", over, 2.0)
        over = faster(look, width, how, kind, "bfloat16")
        if kind in ("int8:row", "e4m3:row") and width in (128, 256) and over is not None:
            bar(f"{kind} lookup of width {width} over our bf16{drawn}", over, 1.25 if width == 128 else 1.5)
    for width, how, kind in move:
        rows, _, part = kind.rpartition(" ")
        over = faster(move, width, how, kind, f"float32 {part}")
        if rows in ("int8:row", "e4m3:row:pow2") and over is not None:
            bar(f"{rows} update of width {width} over float32, {part}{', Zipf' * (how == 'zipf')}", over, 1.0)
    for row in result["wire"]:
        bar(f"{row['rows']}, share of copy", row["share_of_copy"], 0.8)
    return bars


PARTS: dict[str, tuple[tuple[bool, Any], tuple[bool, Any]]] = {  # measured for every width? by what; and under --sweep
    "lookups": ((True, time_lookups), (True, sweep_tiles)),
    "updates": ((True, time_updates), (True, None)),
    "wire": ((False, time_wire), (False, sweep_packing)),
    "hot": ((True, time_hot_updates), (True, None)),
}


if __name__ == "__main__":
    raise SystemExit(main())
