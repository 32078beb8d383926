"""One rank of tuning runs: `python -m tests.dispatch.rank FOLDER RANK`."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from loka.dispatch.database import Database
from loka.dispatch.rows import machine_here
from loka.dispatch.tune import key_of, tune

from .evidence import HERE
from .measured import fake_timer
from .test_tune import JOB


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no clock")


def attempt(mode: str, rank: int) -> dict[str, Any]:
    timer = fake_timer(10.0 if rank == 0 else 20.0)
    here = msgspec.structs.replace(HERE, device="another") if mode == "mixed" and rank == 1 else HERE
    database = Database(":memory:")
    try:
        result = tune([JOB], database, environment=here, timer=fail if mode == "fail" else timer)
    except ValueError as error:
        return {"error": str(error)}
    row = database.find(key_of(JOB, JOB.candidates[0]), machine_here(here)).row
    assert row is not None
    assert row.speedup is not None
    return {"asked": len(timer.asked), "speedup": row.speedup.value, "result": str(result)}


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    seen = {}
    for mode in ("tune", "fail", "mixed"):
        seen[mode] = attempt(mode, rank)
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
