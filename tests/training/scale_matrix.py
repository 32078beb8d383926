"""The whole journey (Probe, one plan, convert, train, checkpoint, resume) for every way to shard tables, every way to hold the dense part, on 2 and 4 ranks; the record says what was found.

    make test-scale          # in an environment of its own, with TorchRec

Each case is `test_sharding.check`: equal plan digests and weights on all ranks, plans that fit the plain model and the other way round, a resumed run with the bits of one that was not stopped, and
a checkpoint that has the same bits on another number of ranks. The file is written again after every case, and finished cases are not repeated.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from loka.records import capture_environment
from training.test_sharding import CODECS, check

CASES = [
    {"world": world, "other": 6 - world, "how": {"sharding": sharding, "dense": dense, "embeddings": codecs, "collectives": collectives}}
    for world, codecs, collectives in ((2, None, None), (4, CODECS, "e4m3:1x128:pow2"))
    for sharding in ("table", "row", "column")
    for dense in ("fsdp", "ddp")
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--anew", action="store_true", help="repeat the cases that passed before")
    options = parser.parse_args()
    out = options.out
    torch.set_num_threads(1)
    stored = json.loads(out.read_text()) if out.exists() and not options.anew else {"cases": []}
    done = [case["case"] for case in stored["cases"] if case["passed"]]
    for case in CASES:
        if json.loads(json.dumps(case)) in done:
            continue
        start, found = time.perf_counter(), {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                found, passed = check(case["world"], case["other"], case["how"], Path(folder), timeout=900), True
            except Exception as error:
                found, passed = {"error": str(error)[-2000:]}, False
                traceback.print_exc()
        seconds = time.perf_counter() - start
        environment = msgspec.to_builtins(capture_environment(device="cpu", threads=torch.get_num_threads()))
        told = {"passed": passed, "seconds": seconds, **found, "environment": environment}
        stored["cases"] = [c for c in stored["cases"] if c["case"] != json.loads(json.dumps(case))]
        stored["cases"].append({"case": json.loads(json.dumps(case)), **told})
        oldest = min((c["environment"] for c in stored["cases"]), key=lambda told: told["date"])
        stored["environment"] = oldest  # a record is as stale as its oldest case
        out.write_text(json.dumps(stored, indent=1) + "\n")
        print("passed" if passed else "FAILED", case, f"{seconds:.0f} s", file=sys.stderr, flush=True)
    return 0 if all(case["passed"] for case in stored["cases"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
