"""units: what one decision is about. The units of a model are found on an example input, and placed in it: chains of linears, linears that
stand alone, embedding tables, and what ranks send each other.

found = loka.units.discover(model, example)       every linear in exactly one unit, and why a chain ends where it ends
chain = loka.units.place(model, found.units[0])   in FP8 from now on; loka.revert(model) takes it back
"""

from loka.units.discovery import Discovered, discover
from loka.units.example import Example, Steps, capture_example
from loka.units.flow import Unknown, record
from loka.units.magnitudes import Seen, measuring
from loka.units.placement import build_chain, describe_chain, place, refuse_unit
from loka.units.tables import find_collectives, find_tables, place_tables, placed_tables, refuse_tables, release_tables

__all__ = [
    "Discovered", "Example", "Seen", "Steps", "Unknown", "build_chain", "capture_example", "describe_chain", "discover",
    "find_collectives", "find_tables", "measuring", "place", "place_tables", "placed_tables", "record",
    "refuse_tables", "refuse_unit", "release_tables",
]  # fmt: skip
