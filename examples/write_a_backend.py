"""Write a backend: your own GEMM, checked against the reference, then evaluated by Probe next to the built-in one.

A backend is anything with the two functions below. Inside the package it is one file and one row of the registry.

    python examples/write_a_backend.py
"""

import torch
from torch import nn

import loka
from loka.formats import dequantize
from loka.kernels.backend import YES
from loka.kernels.quantize import quantize
from loka.probe.engine import Engine


class Mine:
    """Dequantize and multiply in float32: slow and correct."""

    def supports(self, call, device):
        return YES  # or loka.kernels.backend.no("why not")

    def run(self, a, b, *, out_dtype=torch.float32, fast_accum=False):
        return (dequantize(a) @ dequantize(b).mT).to(out_dtype)


class Broken(Mine):
    def run(self, a, b, **options):
        return super().run(a, b, **options) * 1.01


engines = [Engine(e.__name__, lambda x, spec: quantize(x, spec, backend="reference"), e()) for e in (Mine, Broken)]
model = nn.Linear(64, 64)
probe = loka.Probe(model, every=1)
model(torch.randn(256, 64)).square().sum().backward()
probe.step()
for candidate in probe.evaluate(["rowwise"], samples=3, backends=["reference", *engines]).record.sites[0].candidates:
    if candidate.refusal or candidate.relative_l2:  # recipes of chains have only a score
        print(candidate.gemm, candidate.backend, candidate.refusal or f"{candidate.relative_l2.value:.4f} relative L2")
