"""The tables of the documentation: committed results in, Markdown out. One file per subject; `docs/generate.py` says which page gets what."""

__all__ = ["ablation", "generative", "kernels", "models", "results"]
