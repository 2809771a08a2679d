"""How often task=advise is right: predictions beside runs, over data sets, budgets, stores, ranks and
techniques.

    python benchmarks/advise.py --data DIR [--out DIR] [--settings NAME ...] [--steps 60] [--repetitions 2]

For each setting it runs ``task=advise`` with ``advise.verify``, which trains every recipe that was predicted
and the plain one, interleaved. A pair is a setting and a recipe. Told are: in how many pairs whose measured
gain over the plain recipe is above 5% the sign of the gain was right; in how many settings the recommended
recipe is within 10% of the best exact one that was measured; and the errors of ratios and of step times.

What is finished stays in ``--out`` and is not run again: a benchmark that was interrupted goes on with the
setting in which it was. A setting that fails is told, and left out. ``--data``: a folder with
criteo_80k.tsv.gz, taobao_110k.parquet and online_retail.parquet; settings whose file is missing are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

LABEL = "label"


@dataclass(frozen=True)
class Source:
    """Data in a file."""

    file: str
    words: tuple[str, ...]
    label: Callable[[pa.Table], Any] | None = None
    """Makes the column ``LABEL`` of 0 and 1 of a parquet file that has none."""

    def ready(self, data: Path, out: Path) -> Path | None:
        """The file to train on; None if there is none."""
        file = data / self.file
        if not file.exists() or self.label is None:
            return file if file.exists() else None
        made = out / self.file
        if not made.exists():
            table = pq.read_table(file)
            out.mkdir(parents=True, exist_ok=True)
            draft = made.with_suffix(".draft")
            pq.write_table(table.append_column(LABEL, pc.cast(self.label(table), pa.int8())), draft)
            draft.rename(made)
        return made


CRITEO = Source("criteo_80k.tsv.gz", ("data=criteo",))
TAOBAO = Source(
    "taobao_110k.parquet",
    ("data=parquet", f"data.label={LABEL}", "data.sparse=[user,item,category]", "data.table_rows=200000"),
    lambda table: pc.not_equal(table["behavior"], "pv"),
)
RETAIL = Source(
    "online_retail.parquet",
    ("data=parquet", f"data.label={LABEL}", "data.sparse=[CustomerID,StockCode,Country]",
     "data.table_rows=100000"),
    lambda table: pc.greater(table["Quantity"], 10),
)  # fmt: skip
SKEWED = ("data.samples=400000", "data.table_scale=4")
SETTINGS: dict[str, tuple[Source | None, tuple[str, ...]]] = {
    "criteo ssd 1%": (CRITEO, ("tiers=ssd", "advise.memory=1%", "data.batch_size=1024")),
    "criteo ssd 10%": (CRITEO, ("tiers=ssd", "advise.memory=10%", "data.batch_size=1024")),
    "criteo host 5%": (CRITEO, ("tiers=host", "advise.memory=5%", "data.batch_size=1024")),
    "criteo ssd 5%, dim 64": (
        CRITEO,
        ("tiers=ssd", "advise.memory=5%", "model.embedding_dim=64", "data.batch_size=512"),
    ),
    "generated ssd 10%": (None, (*SKEWED, "tiers=ssd", "advise.memory=10%")),
    "generated ssd 2%": (None, (*SKEWED, "tiers=ssd", "advise.memory=2%", "data.batch_size=4096")),
    "generated host 10%, large MLPs": (
        None,
        (*SKEWED, "tiers=host", "advise.memory=10%", "model.bottom=[512,256]", "model.top=[512,256]"),
    ),
    "taobao ssd 5%": (TAOBAO, ("tiers=ssd", "advise.memory=5%", "data.batch_size=1024")),
    "retail ssd 2%": (RETAIL, ("tiers=ssd", "advise.memory=2%", "data.batch_size=1024")),
    "criteo ssd 10%, 2 ranks": (
        CRITEO,
        ("tiers=ssd", "advise.memory=10%", "data.batch_size=1024", "advise.ranks=2"),
    ),
    "criteo in memory, 2 ranks": (CRITEO, ("advise.memory=100%", "data.batch_size=2048", "advise.ranks=2")),
}
"""Data (None: generated) and overrides of each setting."""
CLEAR = 0.05
"""Measured gains above this count for the sign."""
NEAR = 0.9
"""The recommended recipe must reach so much of the best one's speed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-advise"))
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--most", type=int, default=8, help="recipes of a setting that are run")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.settings:
        folder = arguments.out / "".join(c if c.isalnum() else "-" for c in name)
        budget = finished(folder)
        if budget is None:
            source, words = SETTINGS[name]
            file = None if source is None else source.ready(arguments.data, arguments.out)
            if source is not None and file is None:
                print(f"left out, {arguments.data} has no {source.file}: {name}")
                continue
            own = () if source is None else (*source.words, f"data.path={file}")
            status = run([*own, *words], folder, arguments)
            budget = finished(folder)
            if budget is None:
                print(f"left out, the run ended with status {status} and no result ({folder}): {name}")
                continue
        found[name] = budget
    show(found)


def finished(folder: Path) -> dict[str, Any] | None:
    """A setting's advice, if it was verified."""
    file = folder / "advise.json"
    if not file.exists():
        return None
    budgets = json.loads(file.read_text())["budgets"]
    return budgets[0] if budgets and budgets[0]["verified"] is not None else None


def run(words: list[str], folder: Path, arguments: argparse.Namespace) -> int:
    """Advise and verify one setting; its status."""
    command = [
        sys.executable, "-m", "recpipe", "task=advise", *words, f"advise.verify={arguments.most}",
        f"advise.steps={arguments.steps}", f"advise.repetitions={arguments.repetitions}",
        f"task.batches={max(arguments.steps, 120)}", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    return subprocess.run(command, check=False).returncode


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of all pairs, and the scores."""
    print("\n| setting | recipe | predicted | measured | error | predicted ms | measured ms |")
    print("|---|---|--:|--:|--:|--:|--:|")
    signs, near, errors, steps = [], [], [], []
    for name, budget in found.items():
        verified = budget["verified"]
        rows = [row for row in verified["rows"] if row["measured"] is not None]
        plain = verified["plain_step_ms"]
        tell(name, budget["plain"], "1", "1", "", plain)
        steps.append(plain["predicted"] / plain["measured"] - 1)
        for row in rows:
            error = f"{100 * row['error']:+.0f}%"
            mark = " (recommended)" if row["name"] == budget["recommended"] else ""
            tell(
                "",
                row["name"] + mark,
                f"{row['predicted']:.2f}",
                f"{row['measured']:.2f}",
                error,
                row["step_ms"],
            )
            errors.append(row["error"])
            steps.append(row["step_ms"]["predicted"] / row["step_ms"]["measured"] - 1)
            if abs(row["measured"] - 1) > CLEAR:
                signs.append((row["predicted"] > 1) == (row["measured"] > 1))
        exact = {row["name"] for row in budget["rows"] if not row["alters"]}
        speeds = {row["name"]: row["measured"] for row in rows if row["name"] in exact}
        speeds[budget["plain"]] = 1.0
        near.append(speeds.get(budget["recommended"], 0.0) >= NEAR * max(speeds.values()))
    if errors:
        print(f"\n{len(errors)} pairs in {len(found)} settings")
        print(f"sign of the gain right where it is above 5%: {sum(signs)} of {len(signs)}")
        print(f"recommended recipe within 10% of the best exact one: {sum(near)} of {len(near)}")
        for what, values in (("ratio", errors), ("step time", steps)):
            logs = [abs(math.log1p(value)) for value in values]
            ordered = sorted(map(abs, values))
            most = ordered[int(0.9 * (len(ordered) - 1))]
            print(
                f"error of the {what}: geometric mean {100 * math.expm1(fmean(logs)):.1f}%, "
                f"mean {100 * fmean(ordered):.1f}%, 90% below {100 * most:.1f}%"
            )


def tell(
    setting: str, recipe: str, predicted: str, measured: str, error: str, ms: Mapping[str, float]
) -> None:
    """A line of the table."""
    cells = [setting, recipe, predicted, measured, error, f"{ms['predicted']:.2f}", f"{ms['measured']:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
