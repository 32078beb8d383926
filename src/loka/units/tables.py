"""Find embedding tables and collectives in a model, and place and release low-precision tables.

    tables        nn.Embedding and nn.EmbeddingBag, replaced by tables with low-precision rows (`loka.nn.tables`) and
                  restored with their trained values; a table that already has such rows is left alone
    collectives   the weights and gradients of dense matrices that ranks send each other; placed by
                  `loka.comms.placement`

While a table is replaced, its float values are freed; releasing it writes the dequantized rows into the original
parameter. Tables with low-precision rows are trained by `loka.nn.table_optimizer.TableOptimizer`, so create optimizers
after placing a plan with tables.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from loka.kernels.embedding_bag import Rows, parse_rows
from loka.nn.tables import Table, quantize_tables, refusals, replace_everywhere
from loka.nn.wrapping import named_sites
from loka.records.unit import CollectivePlan, TablePlan

_ORIGINALS = "_loka_tables"  # attribute of a model: the modules that placed tables replace, by name


def row_bytes(rows: str, count: int, width: int) -> int:
    """Return the bytes of `count` rows of a width in a row format (e.g. `int8:row`), scales included."""
    parse_rows(rows)
    return count * Rows.of(torch.zeros(1, width), rows).bytes


def find_tables(model: nn.Module) -> list[TablePlan]:
    """Return the embedding tables of a model in their current format.

    Args:
        model: any nn.Module.

    Returns:
        One record per table, in the order of the modules.

    Example:
        >>> [table.bytes for table in find_tables(model)]
    """
    found = []
    for name, module in named_sites(model, once=True):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag | Table):
            count, width = module.num_embeddings, module.embedding_dim
            rows = module.kind if isinstance(module, Table) else str(module.weight.dtype).removeprefix("torch.")
            float32 = 4 * count * width
            taken = module.rows.bytes if isinstance(module, Table) else count * width * module.weight.element_size()
            found.append(TablePlan(name=name, rows=rows, count=count, width=width, bytes=taken, float32_bytes=float32))
    return found


def dense_matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are encoded in collectives: matrices other than embedding tables."""
    tables = {id(p) for _, m in named_sites(model) if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}  # fmt: skip
    return ((name, p) for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in tables)


def find_collectives(model: nn.Module) -> list[CollectivePlan]:
    """Return what the ranks of this model would send each other without encoding.

    Args:
        model: any nn.Module, distributed or not.

    Returns:
        Records of weights and gradients; empty if the model has no dense matrix.

    Example:
        >>> weights, gradients = find_collectives(model)
    """
    elements = sum(p.numel() for _, p in dense_matrices(model))
    plain: dict[str, Any] = {"codec": "fp32", "elements": elements, "bytes": 4 * elements, "float32_bytes": 4 * elements}  # fmt: skip
    return [CollectivePlan(name=name, **plain) for name in ("weights", "gradients")] if elements else []


def refuse_tables(model: nn.Module, tables: Iterable[TablePlan]) -> list[str]:
    """Return every reason why a plan's tables do not fit a model.

    Args:
        model: a model that is not converted yet.
        tables: the plan's tables.

    Returns:
        One line per problem, with the table's name; empty if all fit.

    Example:
        >>> refuse_tables(model, plan.tables)
        []
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
            problems.append(
                f"{table.name}: the plan is for {table.count} x {table.width}, the table is {shape[0]} x {shape[1]}"
            )
        if isinstance(module, Table):
            if module.kind != table.rows:
                problems.append(f"{table.name}: has rows of {module.kind} already, the plan says {table.rows}")
        else:
            problems += [f"{table.name}: {reason}" for reason in refusals(module, model)]
    return problems


def place_tables(model: nn.Module, tables: Sequence[TablePlan]) -> list[str]:
    """Replace tables by tables with the plan's row formats, in place. Call `refuse_tables` first.

    Args:
        model: changed in place.
        tables: the plan's tables.

    Returns:
        The names of the replaced tables.

    Example:
        >>> place_tables(model, plan.tables)
        ['user', 'item']
    """
    modules = dict(named_sites(model))
    originals: dict[str, nn.Module] = model.__dict__.setdefault(_ORIGINALS, {})
    for table in tables:
        original: Any = modules[table.name]
        if not isinstance(original, Table) and not any(original is one for one in originals.values()):
            quantize_tables(model, rows=table.rows, filter_fn=lambda module, _, wanted=original: module is wanted)  # type: ignore[misc]
            original.weight.data = original.weight.data.new_empty(0)
            originals[table.name] = original
    return placed_tables(model)


def placed_tables(model: nn.Module) -> list[str]:
    """Return the names of the tables that are currently replaced.

    Args:
        model: unwrapped.

    Returns:
        Names, in the order they were replaced.

    Example:
        >>> placed_tables(model)
        ['user', 'item']
    """
    return list(model.__dict__.get(_ORIGINALS, {}))


def release_tables(model: nn.Module) -> int:
    """Restore the original tables and parameters, with their trained values.

    Args:
        model: changed in place.

    Returns:
        The number of restored tables.

    Example:
        >>> release_tables(model)
        2
    """
    originals: dict[str, nn.Module] = model.__dict__.pop(_ORIGINALS, {})
    for name, original in originals.items():
        table: Any = model.get_submodule(name)
        weight: Any = original.weight
        weight.data = table.rows.dequantize().to(weight.dtype)
        replace_everywhere(model, table, original.train(table.training))
    return len(originals)
