"""How often task=advise is right: predictions beside runs, over data sets, budgets, stores and techniques.

    python benchmarks/advise.py [--data DIR] [--out DIR] [--settings NAME ...] [--steps 60] [--repetitions 2]

For each setting it runs ``task=advise`` with ``advise.verify``, which trains every recipe that was predicted
and the plain one, interleaved. A pair is a setting and a recipe. Told are: in how many pairs whose measured
gain over the plain recipe is above 5% the sign of the gain was right; in how many settings the recommended
recipe is within 10% of the best exact one that was measured; and the errors of ratios and of step times.

What is finished stays in ``--out``, and is not run again. ``--data``: a folder with criteo_80k.tsv.gz,
taobao_110k.parquet and online_retail.parquet; settings whose file is missing are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

CRITEO = ["data=criteo", "data.path={data}/criteo_80k.tsv.gz"]
TAOBAO = [
    "data=parquet", "data.path={data}/taobao_110k.parquet", "data.label={{column:behavior,equals:buy}}",
    "data.dense=[]", "data.sparse=[user,item,category]",
]  # fmt: skip
SKEWED = ["data.samples=400000", "data.table_scale=4"]
SETTINGS: dict[str, list[str]] = {
    "criteo ssd 1%": [*CRITEO, "tiers=ssd", "tiers.resident_bytes=1%", "data.batch_size=1024"],
    "criteo ssd 10%": [*CRITEO, "tiers=ssd", "tiers.resident_bytes=10%", "data.batch_size=1024"],
    "criteo host 5%": [*CRITEO, "tiers=host", "tiers.resident_bytes=5%", "data.batch_size=1024"],
    "criteo ssd 5%, dim 64": [
        *CRITEO, "tiers=ssd", "tiers.resident_bytes=5%", "model.embedding_dim=64", "data.batch_size=512",
    ],
    "generated ssd 10%": [*SKEWED, "tiers=ssd", "tiers.resident_bytes=10%"],
    "generated ssd 2%": [*SKEWED, "tiers=ssd", "tiers.resident_bytes=2%", "data.batch_size=4096"],
    "generated host 10%, large MLPs": [
        *SKEWED, "tiers=host", "tiers.resident_bytes=10%", "model.bottom=[512,256]", "model.top=[512,256]",
    ],
    "taobao ssd 5%": [*TAOBAO, "tiers=ssd", "tiers.resident_bytes=5%", "data.batch_size=1024"],
}  # fmt: skip
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
    for number, name in enumerate(SETTINGS):
        words = [word.format(data=arguments.data) for word in SETTINGS[name]]
        folder = arguments.out / f"setting-{number}"
        if name in arguments.settings and not (folder / "advise.json").exists():
            given = next((w.partition("=")[2] for w in words if w.startswith("data.path=")), None)
            if given is not None and not Path(given).exists():
                print(f"left out, no {given}: {name}")
                continue
            run(words, folder, arguments)
        if (folder / "advise.json").exists():
            found[name] = json.loads((folder / "advise.json").read_text())["budgets"][0]
    show(found)


def run(words: list[str], folder: Path, arguments: argparse.Namespace) -> None:
    """Advise and verify one setting; advise.json is written at its end."""
    command = [
        sys.executable, "-m", "recpipe", "task=advise", *words, f"advise.verify={arguments.most}",
        f"advise.steps={arguments.steps}", f"advise.repetitions={arguments.repetitions}",
        f"task.batches={max(arguments.steps, 120)}", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    subprocess.run(command, check=True)


def show(found: dict[str, dict[str, Any]]) -> None:
    """A table of all pairs, and the scores."""
    print("\n| setting | recipe | predicted | measured | error | predicted ms | measured ms |")
    print("|---|---|--:|--:|--:|--:|--:|")
    signs, near, errors, steps = [], [], [], []
    for name, budget in found.items():
        verified = budget["verified"]
        rows = [row for row in verified["rows"] if row["measured"] is not None]
        plain = verified["plain_step_ms"]
        cells = [name, budget["plain"], "1", "1", "", f"{plain['predicted']:.2f}", f"{plain['measured']:.2f}"]
        print(f"| {' | '.join(cells)} |")
        steps.append(plain["predicted"] / plain["measured"] - 1)
        for row in rows:
            ms = row["step_ms"]
            cells = [
                "", row["name"], f"{row['predicted']:.2f}", f"{row['measured']:.2f}",
                f"{100 * row['error']:+.0f}%", f"{ms['predicted']:.2f}", f"{ms['measured']:.2f}",
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |")
            errors.append(row["error"])
            steps.append(ms["predicted"] / ms["measured"] - 1)
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


if __name__ == "__main__":
    main()
