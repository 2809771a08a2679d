"""``task=time_to_quality``: recipes trained to a target of quality, in turn, each several times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from recpipe.common.console import Output
from recpipe.errors import UserError
from recpipe.plugin import load
from recpipe.setup.ctx import RunResult, TaskContext, refuse_ranks
from recpipe.tasks.compare_rows import Row, carried_overrides, parse_rows
from recpipe.tasks.interleaved import Launch
from recpipe.tasks.process import interrupt_on_sigterm, run_apart
from recpipe_mlperf import log
from recpipe_mlperf.config import NAME, SECTION, QualityConfig
from recpipe_mlperf.series import Series

OWN = "recipe"
"""The name of the one row that is the command line's own recipe."""


class TimeToQuality:
    """Recipes trained to a target, in processes of their own."""

    def run(self, context: TaskContext) -> RunResult:
        """Run ``quality`` with the command line's overrides; ``UserError`` if there is none."""
        refuse_ranks(f"task={NAME}")
        if context.command_line is None:
            raise UserError(
                f"task={NAME} starts runs from the command line's overrides: run python -m recpipe "
                f"task={NAME}"
            )
        config = context.recipe.section(QualityConfig, SECTION)
        return RunResult(time_to_quality(config, context.directory, context.command_line))


def time_to_quality(
    config: QualityConfig,
    out_dir: Path,
    overrides: Sequence[str],
    *,
    launch: Launch | None = None,
    installed: Collection[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train the rows of ``config`` and leave time_to_quality.json and .html in ``out_dir``.

    ``overrides`` are the user's own, which every run gets. ``launch``, ``installed``: as of
    ``recpipe.tasks.compare``. Returns the content of time_to_quality.json.

    Raises ``UserError`` before any training for what cannot be, and after all is written if no run of any
    row has reached the target, or a row's run has failed.
    """
    seeds = config.drawn()
    goal, better = config.goal, config.better
    if config.benchmark is not None:
        log.require()
    if config.plugins:
        names = load.installed() if installed is None else installed
        rows = parse_rows(config.plugins, names, f"{SECTION}.plugins")
        carried = carried_overrides(overrides, rows, NAME, SECTION)
    else:
        rows = [Row(OWN, None, ())]
        carried = {OWN: [text for text in overrides if not _is_own(text)]}
    launch = launch or partial(run_apart, ranks=config.ranks)
    series = Series(rows, carried, out_dir.absolute(), launch, console or Output())
    series.aim(config, seeds)
    with interrupt_on_sigterm():
        series.check_rows()
        try:
            series.run()
        finally:
            told = series.finish()
    wrong = [f"row '{row['name']}': {row['failed']}" for row in told["rows"] if row["failed"]]
    if not wrong and not any(row["converged"] for row in told["rows"]):
        closest = max if better == "higher" else min
        best = closest((row["best"] for row in told["rows"] if row["best"] is not None), default=None)
        wrong = [
            f"{SECTION}.target={goal:g}: no run reached it, the best {config.metric} was "
            f"{'not defined' if best is None else format(best, '.5g')}; give a target that is nearer, or "
            "train longer (trainer.max_epochs, trainer.max_steps)"
        ]
    if wrong:
        series.files.late.append(UserError(f"{'; '.join(wrong)}. All else is in {series.json}"))
    series.files.check()
    return told


def _is_own(text: str) -> bool:
    """Whether an override is this task's alone, and not for its runs."""
    return text.lstrip("+~").split("=")[0].split(".")[0] in ("task", SECTION, "compare", "advise")
