"""report: records in, one self-contained HTML file out; two sets of records, one page that compares them. No torch, no network."""

from loka.report.pair import Pair, render_pair, write_pair
from loka.report.render import render, write_html
from loka.report.results import Results

__all__ = ["Pair", "Results", "render", "render_pair", "write_html", "write_pair"]
