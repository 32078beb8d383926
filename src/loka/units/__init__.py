"""units: the parts of a model that a plan decides on individually: chains of linears, standalone linears, embedding
tables and what ranks send each other. They are found by running the model on an example input.

    found = loka.units.discover(model, example)       the chains, where each one ends, and why
    chain = loka.units.place(model, found.units[0])   run it in FP8; loka.revert(model) undoes it

discovery.py     `discover`: follow the output of each linear, and put linears that feed each other into chains
following.py     what may stand between two linears of a chain
flow.py          the data flow of one execution; recording.py records it; paths.py does so for all paths a model takes
example.py       examples: capture, copy and call
undisturbed.py   run a model and leave no trace
magnitudes.py    the largest values, from which scales are computed
placement.py     build and place the chain of a unit
tables.py        embedding tables and collectives
"""

from loka.units.discovery import Discovered, discover
from loka.units.example import Example, Steps, capture_example
from loka.units.magnitudes import Seen, measuring
from loka.units.placement import build_chain, describe_chain, place, refuse_unit
from loka.units.recording import Unknown, record
from loka.units.tables import find_collectives, find_tables, place_tables, placed_tables, refuse_tables, release_tables

__all__ = [
    "Discovered", "Example", "Seen", "Steps", "Unknown", "build_chain", "capture_example", "describe_chain", "discover",
    "find_collectives", "find_tables", "measuring", "place", "place_tables", "placed_tables", "record",
    "refuse_tables", "refuse_unit", "release_tables",
]  # fmt: skip
