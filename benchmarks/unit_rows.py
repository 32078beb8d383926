"""The measured speeds of units, collected from records of `loka.tune` into the file that ships with the package (`loka.tuning.estimating`).

    python benchmarks/unit_rows.py benchmarks/results/h200/tune_zoo.json benchmarks/results/h200/tune_zoo_wukong.json

Every unit that was timed as a chain on the named device becomes one row: rows, widths, training or serving, and its speed-up over compiled bf16 with its interval.
"""

import json
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "src" / "loka" / "tuning" / "measured" / "h200-units.json"


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    sites = {site["site"]: site for site in record["plan"]["sites"]}
    made = []
    for unit in record["units"]:
        found = unit["speedup"]
        if found is None or unit["way"] not in ("chain", "high") or unit["reason"].startswith(("rowwise", "blockwise")):
            continue
        links = [[sites[name]["k"], sites[name]["n"]] for name in unit["linears"]]
        row = {"training": record["target"] == "train", "rows": sites[unit["linears"][0]]["m"], "links": links}
        made.append(row | {"speedup": [round(found[end], 4) for end in ("value", "low", "high")]})
    return made


def main(files: list[str]) -> None:
    found, environment = [], {}
    for file in files:
        content = json.loads(Path(file).read_text())
        environment = {k: content["environment"][k] for k in ("device", "date", "torch", "triton", "commit")}
        found += [row for entry in content["rows"] for row in rows_of(entry["record"])]
    unique = {json.dumps([row["training"], row["rows"], row["links"]]): row for row in found}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in unique.values())
    head = json.dumps({**environment, "command": "benchmarks/tune_zoo.py"})[1:-1]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(f'{{{head}, "units": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
