"""Puts what ``published.py --json FILE`` wrote into the table of the pages.

    python benchmarks/peers/published_table.py FILE ... --commit COMMIT [--table FILE]

A row replaces that of the same model and rows; each says of which commit and how many seeds it is.
``docs/tables.py`` shows the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from published import mean_and_half
from published_works import WORKS

TABLE = Path(__file__).resolve().parents[1] / "results" / "published_models.json"
DATA = {"criteo": "Criteo", "taobao": "Taobao", "online_retail": "Online Retail"}


def rows_of(name: str, sides: Mapping[str, Any], commit: str) -> Iterator[list[Any]]:
    """A row for each label: means with their intervals, which a single seed has not."""
    work, found = WORKS[name], list(sides.values())
    for label in found[0]["runs"][0]:
        cells: list[Any] = []
        for figure in ("auc", "logloss"):
            for side in found:
                mean, half = mean_and_half([run[label][figure] for run in side["runs"]])
                interval = [round(value, 5) for value in (mean, mean - half, mean + half)]
                cells.append(interval if len(side["runs"]) > 1 else round(mean, 5))
        several = len(found[0]["runs"][0]) > 1
        rows = f"{DATA[work.data]}, {label}" if several else work.rows or DATA[work.data]
        rates, seeds = (
            ", ".join(str(value) for value in values) for values in zip(*map(_told, found), strict=True)
        )
        yield [work.title or work.named, rows, work.beside, *cells, rates, seeds, commit]


def _told(side: Mapping[str, Any]) -> tuple[float, int]:
    return side["rate"], len(side["runs"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    table = json.loads(options.table.read_text(encoding="utf-8"))
    for file in options.files:
        for name, sides in json.loads(file.read_text(encoding="utf-8"))["models"].items():
            for row in rows_of(name, sides, options.commit):
                kept = [number for number, old in enumerate(table["rows"]) if old[:3] == row[:3]]
                if kept:
                    table["rows"][kept[0]] = row
                else:
                    table["rows"].append(row)
    table["date"] = datetime.now(UTC).date().isoformat()
    options.table.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
