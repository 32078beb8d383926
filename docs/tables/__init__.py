"""The tables of the documentation, made from committed results. One file per subject; `docs/generate.py` assigns tables to pages."""

__all__ = ["ablation", "generative", "kernels", "models", "results"]

import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "benchmarks")
)  # the record types of benchmarks are defined there
