"""The environments that produced the records: machines, versions, and the exact commands."""

from loka.records import Environment
from loka.report.markup import about, count, escape
from loka.report.results import Results


def write_environment(results: Results) -> str:
    """Return every environment with its command."""
    found = results.environments
    if not found:
        return ""
    blocks = []
    for number, (name, environment) in enumerate(found.items()):
        extra = _write_runs(results) if number == 0 else ""
        title = f"<h3>{escape(name)}</h3>" if len(found) > 1 else ""
        blocks.append(f'{title}<dl class="env">{_write_facts(environment)}{extra}</dl>')
    return about("Run the command again to reproduce a result; timings vary slightly.") + "".join(blocks)


def _write_facts(found: Environment) -> str:
    facts = {
        "command": f"<code>{escape(found.command)}</code>",
        "date": escape(found.date),
        "loka": escape(f"{found.loka}, commit {found.commit or 'unknown'}"),
        "Python, torch": escape(
            f"{found.python}, {found.torch}" + (f", triton {found.triton}" if found.triton else "")
        ),
        "device": escape(found.device + (f", driver {found.driver}" if found.driver else "")),
        "processor": escape(f"{found.cpu}, {count(found.threads, 'thread')}"),
    }
    return "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())


def _write_runs(results: Results) -> str:
    seeds = sorted({run.seed for run in results.runs})
    if not seeds:
        return ""
    steps = escape(", ".join(f"{run.name} {run.steps:,}" for run in results.ordered_runs))
    return f"<dt>seed</dt><dd>{', '.join(map(str, seeds))}</dd><dt>steps</dt><dd>{steps}</dd>"
