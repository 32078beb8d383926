"""report: records in, one self-contained HTML file out. No torch, no network."""

from loka.report.render import render, write_html
from loka.report.results import Results

__all__ = ["Results", "render", "write_html"]
