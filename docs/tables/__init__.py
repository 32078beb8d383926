"""The tables of the documentation: committed results in, Markdown out. One file per subject; `docs/generate.py` says which page gets what."""

__all__ = ["ablation", "generative", "kernels", "models", "results"]

import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "benchmarks")
)  # records of benchmarks are described beside them
