"""report: render records as one self-contained HTML file, or two sets of records for comparison. No torch, no network."""

from loka.report.pair import Pair, render_pair, write_pair
from loka.report.render import render, write_html
from loka.report.results import Results

__all__ = ["Pair", "Results", "render", "render_pair", "write_html", "write_pair"]
