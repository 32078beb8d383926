"""Tables and collectives as units: found in a model, placed in it, taken back.

    tables        nn.Embedding and nn.EmbeddingBag, swapped for low-precision rows (`loka.nn.tables`) and back, with what was trained; a table that has such rows already is left as it is
    collectives   the dense matrices, whose weights and gradients ranks send each other; `loka.comms.placement` places them, since that room is above this one

While a table is swapped its float values are gone, that is what is saved; taking it back writes what the rows hold into the original parameter. A table with low-precision rows is trained by `loka.nn.table_optimizer.TableOptimizer`, so an optimiser is made after a plan with tables was placed.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from loka.kernels.embedding_bag import Rows, parse_rows
from loka.nn.tables import Table, quantize_tables, refusals
from loka.nn.wrapping import named_sites
from loka.records.unit import CollectivePlan, TablePlan

_ORIGINALS = "_loka_tables"  # on a model: the modules that placed tables stand for, by name


def row_bytes(rows: str, count: int, width: int) -> int:
    """What `count` rows take in a format, scales included.

    Args:
        rows: the format, e.g. `int8:row`.
        count: how many.
        width: of each.

    Returns:
        Bytes.
    """
    import torch

    parse_rows(rows)
    return count * Rows.of(torch.zeros(1, width), rows).bytes


def find_tables(model: nn.Module) -> list[TablePlan]:
    """The embedding tables of a model, as they are.

    Args:
        model: any nn.Module.

    Returns:
        One for each, in the order of the modules.
    """
    found = []
    for name, module in named_sites(model):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | Table):
            count, width = module.num_embeddings, module.embedding_dim
            rows = module.kind if isinstance(module, Table) else str(module.weight.dtype).removeprefix("torch.")
            float32 = 4 * count * width
            taken = module.rows.bytes if isinstance(module, Table) else count * width * module.weight.element_size()
            found.append(TablePlan(name=name, rows=rows, count=count, width=width, bytes=taken, float32_bytes=float32))
    return found


def dense_matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that travel encoded: matrices that are no tables."""
    tables = {id(p) for _, m in named_sites(model) if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}  # fmt: skip
    return ((name, p) for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in tables)


def find_collectives(model: nn.Module) -> list[CollectivePlan]:
    """What the ranks of this model would send each other, as it is.

    Args:
        model: any nn.Module, spread or not.

    Returns:
        Weights and gradients; nothing where there is no dense matrix.
    """
    elements = sum(p.numel() for _, p in dense_matrices(model))
    plain: dict[str, Any] = {"codec": "fp32", "elements": elements, "bytes": 4 * elements, "float32_bytes": 4 * elements}  # fmt: skip
    return [CollectivePlan(name=name, **plain) for name in ("weights", "gradients")] if elements else []


def refuse_tables(model: nn.Module, tables: Iterable[TablePlan]) -> list[str]:
    """Every reason why a plan's tables do not fit a model; none where they do.

    Args:
        model: not yet converted.
        tables: of the plan.

    Returns:
        Reasons, with the names.
    """
    modules, problems = dict(named_sites(model)), []
    for table in tables:
        module = modules.get(table.name)
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag | Table):
            seen = "nothing" if module is None else f"a {type(module).__name__}"
            problems.append(f"{table.name}: expected an embedding table, the model has {seen} there")
            continue
        shape = module.num_embeddings, module.embedding_dim
        if shape != (table.count, table.width):
            problems.append(f"{table.name}: the plan is for {table.count} x {table.width}, the table is {shape[0]} x {shape[1]}")  # fmt: skip
        if isinstance(module, Table):
            if module.kind != table.rows:
                problems.append(f"{table.name}: has rows of {module.kind} already, the plan says {table.rows}")
        else:
            problems += [f"{table.name}: {reason}" for reason in refusals(module, model)]
    return problems


def place_tables(model: nn.Module, tables: Sequence[TablePlan]) -> list[str]:
    """Swap tables for the rows a plan says, in place; `refuse_tables` found nothing.

    Args:
        model: changed in place.
        tables: of the plan.

    Returns:
        The names of those that were swapped.
    """
    modules = dict(named_sites(model))
    originals: dict[str, nn.Module] = model.__dict__.setdefault(_ORIGINALS, {})
    for table in tables:
        if not isinstance(modules[table.name], Table):
            original: Any = modules[table.name]
            quantize_tables(model, rows=table.rows, filter_fn=lambda module, _, wanted=original: module is wanted)  # type: ignore[misc]
            original.weight.data = original.weight.data.new_empty(0)
            originals[table.name] = original
    return placed_tables(model)


def placed_tables(model: nn.Module) -> list[str]:
    """The names of tables that a plan swapped and nobody has taken back.

    Args:
        model: the plain one.

    Returns:
        Names.
    """
    return list(model.__dict__.get(_ORIGINALS, {}))


def release_tables(model: nn.Module) -> int:
    """The original modules and parameters again, with what was trained.

    Args:
        model: changed in place.

    Returns:
        How many were swapped back.
    """
    originals: dict[str, nn.Module] = model.__dict__.pop(_ORIGINALS, {})
    for name, original in originals.items():
        parent, _, child = name.rpartition(".")
        table: Any = model.get_submodule(name)
        weight: Any = original.weight
        weight.data = table.weight.to(weight.dtype)
        setattr(model.get_submodule(parent), child, original.train(table.training))
    return len(originals)
