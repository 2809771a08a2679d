"""A short comparison at the end of a training run: its first steps, once with its plugins and once without.

``task=compare`` is the real one; this one shows in seconds what a technique does, in the same process.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from rich.console import Console

from recpipe.common.console import alone, log, show
from recpipe.report import figures, terminal
from recpipe.report.page import Head, Table
from recpipe.setup.ctx import RunInputs, RunResult

EMBEDDED = "synthetic"
"""The data of a first look, for which ``task.beside=auto`` compares."""
Train = Callable[[DictConfig, Path, RunInputs], RunResult]
"""Carries out a recipe in a folder: ``recpipe.run.carry_out``."""
PLAIN = ("nocache", "lru")
"""The policies that ``auto`` compares with."""


def policies_beside(report: Mapping[str, Any]) -> Sequence[str]:
    """The built-in policies that a finished run, whose report.json has ``report``, is to be shown beside;
    empty: none.

    Only for a run of one process from its first step, whose cache a plugin owns.
    """
    recipe, owner = report["recipe"], report["assembly"].get("cache")
    asked, plugins = recipe["task"]["beside"], recipe.get("plugins") or {}
    if asked is None or owner not in plugins or report["ranks"]["world"] > 1 or recipe["resume"]:
        return ()
    if asked == "auto":
        return PLAIN if recipe["data"]["name"] == EMBEDDED else ()
    return list(asked)


def beside(
    composed: DictConfig, policies: Sequence[str], directory: Path, train: Train
) -> list[dict[str, Any]]:
    """Train, by ``train``, the recipe's first ``task.beside_steps`` steps under each of ``policies`` and with
    its plugins; a row for each: ``name``, ``samples_per_second`` over all steps, and ``io``."""
    rows = []
    for name in (*policies, ""):
        recipe = copy.deepcopy(composed)
        with open_dict(recipe):
            recipe.task.export_parameters = recipe.task.export_predictions = None
            recipe.trainer.update(
                max_steps=recipe.task.beside_steps, checkpoint_every=None, logger=None, callbacks=[]
            )
            if name:
                recipe.plugins = {}
                recipe.tiers.policy = name
        with alone(), tempfile.TemporaryDirectory(prefix="beside-", dir=directory) as folder:
            given = RunInputs(screen=False, files=False, evaluates=False)
            report = train(recipe, Path(folder), given).report
        rows.append(
            {
                "name": name or "+".join(composed.plugins),
                "samples_per_second": report["throughput"]["samples_per_second"],
                "io": report["io"],
            }
        )
    return rows


def show_beside(composed: DictConfig, report: Mapping[str, Any], directory: Path, train: Train) -> None:
    """Compare a finished training run of ``composed`` with plain policies, if ``task.beside`` asks for it."""
    policies = policies_beside(report)
    if not policies:
        return
    steps = min(composed.task.beside_steps, sum(report["throughput"]["step_histogram"]["counts"]))
    log.info("the first %d steps once more, with and without %s", steps, "+".join(composed.plugins))
    rows = beside(composed, policies, directory, train)
    show(lambda out: print_beside(rows, steps, out))


def print_beside(rows: Sequence[Mapping[str, Any]], steps: int, console: Console) -> None:
    """The rows as a table, the technique last, and why it is faster or slower than the best of the others."""
    heads = [Head(f"first {steps} steps", number=False, whole=True)]
    heads += map(Head, ("samples/s", "ratio", "cold rows moved", "bytes", "waited"))
    cells = [
        (
            row["name"],
            figures.count(row["samples_per_second"]),
            figures.decimal(row["samples_per_second"] / rows[0]["samples_per_second"], 2),
            figures.count(row["io"]["rows_read"] + row["io"]["rows_written"]),
            figures.size(_bytes(row)),
            f"{row['io']['wait_seconds']:.2f} s",
        )
        for row in rows
    ]
    console.print(terminal.drawn(Table(heads, cells), "wide"))
    console.print(reason(rows), markup=False, highlight=False)


def reason(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the technique, the last row, gained or lost over the first row and over the best of the others."""
    *others, technique = rows
    best = max(others, key=lambda row: float(row["samples_per_second"]))
    parts = []
    for other in [others[0], best] if best is not others[0] else [best]:
        ratio = technique["samples_per_second"] / other["samples_per_second"]
        moved, theirs = (figures.size(_bytes(row)) for row in (technique, other))
        waited, their_wait = (row["io"]["wait_seconds"] for row in (technique, other))
        parts.append(
            f"{ratio:.2f} times as fast as {other['name']}: it moves {moved} and not {theirs}, and waits "
            f"{waited:.2f} s and not {their_wait:.2f} s for cold rows"
        )
    return f"{technique['name']} is {'; '.join(parts)}. One run of each; task=compare repeats and checks them"


def _bytes(row: Mapping[str, Any]) -> int:
    return int(row["io"]["bytes_read"] + row["io"]["bytes_written"])
