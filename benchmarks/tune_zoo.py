"""`loka.tune` on models that nobody rewrote: step time and loss of one configuration, in one record.

    python benchmarks/tune_zoo.py --models dlrm,wukong --targets train,serve --out tune_zoo.json

Labels come from a fixed teacher, the model is trained 500 steps in bf16 first, then tuned on 16 batches it has not seen. One model after another: tuning times what it chooses, so the card must
be its own.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import zoo


def teacher(shapes, device, seed=7):
    """A fixed function of the inputs, smooth and not linear; labels are drawn from it."""
    g = torch.Generator(device=device).manual_seed(seed)
    weights = [
        torch.randn(64, s.numel() // s.shape[0], device=device, generator=g) / (s.numel() / s.shape[0]) ** 0.5
        for s in shapes
    ]
    last = torch.randn(64, device=device, generator=g) / 2

    def label(inputs, generator):
        h = sum(x.flatten(1).float() @ w.T for x, w in zip(inputs, weights, strict=True))
        p = torch.sigmoid(torch.tanh(h) @ last)
        return torch.bernoulli(p, generator=generator)

    return label


def batches(name, device, count, seed):
    """Fresh inputs with labels."""
    _, shapes = _shapes(name, device)
    label = teacher(shapes, device)
    g = torch.Generator(device=device).manual_seed(seed)
    for _ in range(count):
        inputs = tuple(torch.randn(s.shape, device=device, generator=g) for s in shapes)
        yield inputs, label(inputs, g)


def _shapes(name, device):
    return zoo.make(name, device)


def loss(output, target):
    return F.binary_cross_entropy_with_logits(output.float()[..., 0], target, reduction="none")


def train(model, name, device, steps):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3 if name in ("dlrm", "cross", "tower") else 3e-4, fused=True
    )
    run = torch.compile(model, dynamic=False)
    for inputs, y in batches(name, device, steps, seed=1):
        with torch.autocast(device, torch.bfloat16):
            value = loss(run(*inputs), y).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(value)


def tune(name, target, steps, seconds, device="cuda"):
    import loka

    torch.manual_seed(0)
    with torch.device(device):
        model, _ = zoo.make(name, device)
    began = time.time()
    trained = train(model, name, device, steps)
    facts = {"model": name, "target": target, "trained_loss": trained, "train_s": time.time() - began}
    held = list(batches(name, device, 16, seed=2))
    if target == "serve":
        model = model.eval().to(torch.bfloat16)
        held = [(tuple(x.to(torch.bfloat16) for x in inputs), y) for inputs, y in held]
    torch.cuda.reset_peak_memory_stats()
    began = time.time()
    tuned = loka.tune(model, held, loss, target=target, seconds=seconds, progress=False)
    facts["tune_s"] = time.time() - began
    facts["printed"] = str(tuned)
    facts["record"] = msgspec.to_builtins(tuned.record)
    facts["allocated_gib"] = torch.cuda.memory_allocated() / 2**30
    return facts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="dlrm,tower,cross,wukong,encoder")
    parser.add_argument("--targets", default="train,serve")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    import loka.records as records

    environment = msgspec.to_builtins(records.capture_environment(device=torch.cuda.get_device_name()))
    rows = []
    for name in a.models.split(","):
        for target in a.targets.split(","):
            try:
                rows.append(tune(name, target, a.steps, a.seconds))
                print(
                    f"== {name} {target}: trained {rows[-1]['train_s']:.0f} s, tuned in {rows[-1]['tune_s']:.0f} s\n{rows[-1]['printed']}",
                    flush=True,
                )
            except Exception as error:  # the next model is still worth its row
                import traceback

                rows.append({"model": name, "target": target, "failed": traceback.format_exc()[-3000:]})
                print(f"== {name} {target}: FAILED {error}\n{traceback.format_exc()[-1500:]}", flush=True)
            Path(a.out).write_text(
                json.dumps({"command": " ".join(sys.argv), "environment": environment, "rows": rows}, indent=1)
            )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
