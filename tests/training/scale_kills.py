"""kill -9 of a rank at random moments: the others end by themselves and name it, and a resumed run ends with the bits of one that was not disturbed.

    python tests/training/scale_kills.py --kills 10 --out scale-kills.json

Processes are started one by one, without torchrun's agent, which would end the others itself. A moment is a random step and a random part of the time that a step takes, checkpoints included.
int8 rows, stochastic E4M3 collectives, dropout, FSDP2; with `--sharding row` tables sharded by TorchRec. The record has every kill: when, who, how the others ended, how long it took.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

STEPS, EVERY = 60, 3


def child(out: str, sharding: str | None) -> None:
    """One rank: train or resume, and leave the digest of the weights."""
    import torch

    from loka.comms import RankError
    from loka.training import Callback, TrainConfig
    from loka.training.distributed import DistributedTrainer, Distribution, joined
    from training.jobs_sharded import digest, plain_state

    class Telling(Callback):
        name, every_rank = "telling", True

        def on_step_begin(self, trainer: Any) -> None:
            place = Path(out, f"step-{os.environ['RANK']}")
            place.with_suffix(".new").write_text(str(trainer.step))
            place.with_suffix(".new").replace(place)

    torch.set_num_threads(1)
    config = TrainConfig(
        steps=STEPS, batch_size=48, device="cpu", log_every=5, checkpoint_every=EVERY, learning_rate=1e-2, compile="off"
    )
    if sharding is None:
        from training.toy import make_data, make_model

        model, data = make_model(dropout=0.1), make_data()
        how = Distribution(rows="int8:row", collectives="e4m3:1x128:pow2:stochastic")
    else:
        from training import jobs_sharded

        data = jobs_sharded.make_data()
        model, how = jobs_sharded.make_model(data), Distribution(sharding=sharding)
    try:
        with joined("gloo", timeout=60):
            trainer = DistributedTrainer(model, data, config, how, out=out, callbacks=[Telling()], roll_call=5)
            resumed = trainer.fit(resume=True).resumed_from
            state = plain_state(trainer.module)
            if os.environ["RANK"] == "0":
                Path(out, "result.json").write_text(json.dumps({"digest": digest(state), "resumed": resumed}))
    except RankError as error:
        print(f"RankError {json.dumps(list(error.ranks))}: {error}", file=sys.stderr, flush=True)
        os._exit(3)  # gloo's threads would wait for who is gone
    os._exit(0)


def launch(world: int, out: Path, sharding: str | None) -> list[subprocess.Popen[str]]:
    """The ranks of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--child", str(out), *(["--sharding", sharding] if sharding else [])]
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]  # fmt: skip


def finish(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all; what each said last."""
    return [(rank.communicate(timeout=300)[1] or "")[-3000:] for rank in ranks]


def reach(step: int, ranks: list[subprocess.Popen[str]], out: Path) -> None:
    """Wait until every rank has begun a step."""
    places = [out / f"step-{rank}" for rank in range(len(ranks))]
    while not all(place.exists() and int(place.read_text()) >= step for place in places):
        if any(rank.poll() not in (None, 0) for rank in ranks):
            raise RuntimeError(f"a rank ended before it began: {finish(ranks)}")
        time.sleep(0.005)


def undisturbed(world: int, out: Path, sharding: str | None) -> tuple[str, float]:
    """The digest of a run that nobody disturbs, and the seconds it trains."""
    ranks = launch(world, out, sharding)
    reach(0, ranks, out)
    start = time.perf_counter()
    said = finish(ranks)
    seconds = time.perf_counter() - start
    assert all(rank.returncode == 0 for rank in ranks), said
    return json.loads((out / "result.json").read_text())["digest"], seconds


def kill_one(world: int, out: Path, sharding: str | None, step: int, after: float, victim: int) -> dict[str, Any]:
    """Kill a rank, see how the others end, and resume."""
    ranks = launch(world, out, sharding)
    reach(step, ranks, out)
    time.sleep(after)
    alive = ranks[victim].poll() is None
    os.kill(ranks[victim].pid, signal.SIGKILL) if alive else None
    start = time.perf_counter()
    said = finish(ranks)
    seconds = time.perf_counter() - start
    others = [text for rank, text in enumerate(said) if rank != victim]
    named = [f"RankError [{victim}]" in text for text in others]
    kept = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    again = launch(world, out, sharding)
    told = finish(again)
    assert all(rank.returncode == 0 for rank in again), told
    result = json.loads((out / "result.json").read_text())
    return {
        "step": step, "after_seconds": after, "victim": victim, "was_alive": alive, "seconds_to_end": seconds, "exit_codes": [r.returncode for r in ranks],
        "named_by_all_others": all(named), "others_said": [text.strip().splitlines()[-1][:300] if text.strip() else "" for text in others],
        "last_checkpoint": kept[-1] if kept else None, "resumed_from": result["resumed"], "digest": result["digest"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child")
    parser.add_argument("--sharding")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.sharding)
    from loka.records import capture_environment

    chance, kills = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder:
        digest, seconds = undisturbed(options.world, Path(folder, "straight"), options.sharding)
        for number in range(options.kills):
            step, after = chance.randrange(STEPS), chance.uniform(0, seconds / STEPS)
            victim = chance.randrange(options.world)
            found = kill_one(options.world, Path(folder, f"kill-{number}"), options.sharding, step, after, victim)
            found["same_bits"] = found.pop("digest") == digest
            kills.append(found)
            print(json.dumps(found), file=sys.stderr, flush=True)
            import msgspec

            record = {
                "world": options.world, "sharding": options.sharding, "steps": STEPS, "checkpoint_every": EVERY, "seed": options.seed, "seconds_undisturbed": seconds, "kills": kills,
                "environment": json.loads(msgspec.json.encode(capture_environment(device="cpu", threads=1))),
            }  # fmt: skip
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    hit = [kill for kill in kills if kill["was_alive"]]
    return 0 if all(kill["same_bits"] and (kill["named_by_all_others"] or not kill["was_alive"]) for kill in hit) else 1


if __name__ == "__main__":
    raise SystemExit(main())
