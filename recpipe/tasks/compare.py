"""task=compare: the recipes interleaved (A B C A B C ...), each run in a fresh process, never two at once."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from recpipe.backend.matmul import float32_products
from recpipe.common.console import Output
from recpipe.common.owned import scratch_directory
from recpipe.common.words import quoted
from recpipe.config.task import CompareConfig
from recpipe.errors import UserError
from recpipe.plugin import load
from recpipe.report import compared, comparison, figures, run_page, terminal
from recpipe.report.compared import Rounds, Run
from recpipe.report.environment import environment
from recpipe.report.files import ReportFiles
from recpipe.report.record import as_json
from recpipe.report.remarks import faults
from recpipe.setup.ctx import RunResult, TaskContext, find_device, refuse_ranks
from recpipe.tasks.compare_judge import ROUNDING, Judge
from recpipe.tasks.compare_rows import Row, at_equal_memory, carried_overrides, parse_rows
from recpipe.tasks.process import OutOfTime, interrupt_on_sigterm, run_apart
from recpipe.training.dense import try_out

UNTIMED = ("trainer.checkpoint_every=null", "trainer.eval_every=1.0")
"""Overrides that switch off what costs time but is not compared. The user's own come later and win."""
RUNS = "runs"
"""The folder of the runs' directories in the comparison's."""
Launch = Callable[..., dict[str, Any]]
"""Runs ``python -m recpipe`` with these arguments, list[str], in this directory, Path; returns its
report.json, or {} if there is none. Under ``compare.minutes`` it is told the ``seconds`` that are left as
well, and raises ``OutOfTime`` after them."""


class Compare:
    """The same work under several plugins, in processes of their own. This one does not use the GPU, whose
    memory is theirs."""

    def run(self, context: TaskContext) -> RunResult:
        """Run ``recipe.compare`` with the command line's overrides; ``UserError`` if there is none."""
        cfg = context.recipe
        refuse_ranks("task=compare")
        if context.command_line is None:
            raise UserError(
                "task=compare starts runs from the command line's overrides: run python -m recpipe "
                "task=compare"
            )
        assert cfg.compare is not None
        device = find_device(cfg.trainer.device)
        try_out(cfg.optim.dense, torch.device("cpu"))
        with float32_products(device):
            return RunResult(compare(cfg.compare, context.directory, context.command_line))


def compare(
    config: CompareConfig,
    out_dir: Path,
    overrides: Sequence[str],
    *,
    launch: Launch | None = None,
    installed: Collection[str] | None = None,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the rows of ``config`` and leave compare.json and compare.html in ``out_dir``.

    ``overrides`` are the user's own, which every run gets. ``installed`` are the plugins that a row may name
    (default: all installed). ``clock`` gives the seconds that ``compare.minutes`` counts. Returns
    compare.json's content.

    Raises UserError before any training for unknown names and for rows that cannot be assembled. Raises it
    after all is done and printed for rows that failed or that declare to be exact but are not, and for files
    that could not be written. If a run of the first row fails or Ctrl-C comes, finished results are kept,
    with ``"partial": true`` in compare.json.
    """
    launch = launch or partial(run_apart, ranks=config.ranks)
    rows = parse_rows(config.plugins, load.installed() if installed is None else installed)
    carried = carried_overrides(overrides, rows)
    plan = _Comparison(rows, carried, config, out_dir.absolute(), launch, console or Output(), clock)
    with interrupt_on_sigterm():
        try:
            plan.check_rows()
            plan.run()
        except OutOfTime:
            plan.out_of_time = True
        except (KeyboardInterrupt, UserError):
            plan.finish(partial=True)
            raise
        content = plan.finish(partial=plan.counted < config.least_rounds)
    if plan.out_of_time and not any(row.result.runs for row in rows):
        raise UserError(f"compare.minutes={config.minutes:g} ended before any run had; give more")
    if wrong := faults(content):
        plan.files.late.append(
            UserError(f"{'; '.join(wrong)}. All else is in {plan.out_dir / 'compare.json'}")
        )
    plan.files.check()
    return content


def _write_page(page: Path) -> None:
    """Write the page of a run from the report.json beside it."""
    run_page.write(json.loads(page.with_name("report.json").read_text(encoding="utf-8")), page.parent)


class _Bar(Progress):
    """The bar of the rounds; on a terminal the tables of the rounds so far stand above it."""

    tables: Sequence[RenderableType] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from self.tables
        yield from super().get_renderables()


class _Comparison:
    """The rounds of one comparison and their results so far."""

    def __init__(
        self,
        rows: list[Row],
        carried: dict[str, list[str]],
        config: CompareConfig,
        out_dir: Path,
        launch: Launch,
        console: Console,
        clock: Callable[[], float],
    ) -> None:
        self.rows, self.carried, self.launch, self.console = rows, carried, launch, console
        self.config, self.out_dir = config, out_dir
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.clock = clock
        self.ends = math.inf if config.minutes is None else clock() + 60 * config.minutes
        self.out_of_time = False
        """Whether ``compare.minutes`` has ended it."""
        self.progress = _Bar(*columns, console=console)
        self.bar = self.progress.add_task("comparing", total=None)
        self.finished = 0
        """Rounds, warm-up included, in which every row has run."""
        self.judge = Judge(scratch_directory(out_dir, "parameters"))
        self.files = ReportFiles(out_dir)
        self.environment = environment()

    def check_rows(self) -> None:
        """Assemble every recipe once (task=plan), so that a clash is reported now and not after hours."""
        for index, row in enumerate(self.rows):
            if row not in self.rows[:index]:
                self._launch(index, "plan", f"plan-{index}-{row.name}", [])

    def run(self) -> None:
        """Run all rounds. The first one, whether warm-up or not, gives traffic, and shows for which rows to
        add a policy with equal memory.

        A row whose run fails is left out from then on. If the first row fails, the comparison ends, because
        all is relative to it. Under ``compare.minutes`` no round begins that would not end in time.
        """
        lasted = 0.0
        with self.progress:
            while self._wanted():
                began = self.clock()
                if began + lasted > self.ends:
                    self.out_of_time = True
                    return
                self._run_rows()
                if self.finished == 0 and self.config.equal_memory:
                    self._add_rows()
                if self.judge.needs_rounding(self.finished, self.seed):
                    self.progress.update(self.bar, description="one rounding")
                    self._run_nudged()
                self.judge.end_round()
                self.finished += 1
                lasted = self.clock() - began
                if self._wanted():
                    self._show_so_far()
            self.progress.tables = ()

    def _wanted(self) -> bool:
        """Whether another round is to be run, if there is time."""
        config = self.config
        if self.counted >= config.least_rounds:
            return self.counted < config.most_rounds and not self._precise()
        return True

    def _precise(self) -> bool:
        wanted = self.config.precision
        return wanted is None or compared.precise(
            [row.result for row in self.rows], wanted, self.rounds.counted
        )

    @property
    def rounds(self) -> Rounds:
        """The rounds so far."""
        return Rounds(self.config.warmup, self.finished)

    @property
    def counted(self) -> int:
        """Counted rounds that are finished."""
        return len(self.rounds.counted)

    @property
    def seed(self) -> int:
        """The number of this round's seed."""
        return self.finished % self.config.seeds

    def _run_rows(self, first: int = 0) -> None:
        """This round's runs of the rows from number ``first`` on."""
        number, config = self.finished - self.config.warmup + 1, self.config
        label = f"round {number}" if number > 0 else "warm-up"
        rounds = max(self.finished + 1, config.warmup + config.least_rounds)
        for index in range(first, len(self.rows)):
            row = self.rows[index]
            total = rounds * len(self.rows)
            self.progress.update(self.bar, description=f"{label}: {row.name}", total=total)
            if row.result.failed is None:
                self._tell(label, self._run_row(index))
            self.progress.advance(self.bar)

    def _tell(self, label: str, text: str) -> None:
        self.progress.console.print(f"{label:>10}  {text}", markup=False, highlight=False)

    def _add_rows(self) -> None:
        """Add policies with the memory of techniques that take more, as rows with the same number of runs."""
        present = len(self.rows)
        added = at_equal_memory(self.rows)
        for match in added:
            self.rows.append(match.row)
            self.carried[match.row.name] = self.carried[match.policy.name]
        self._run_rows(present)
        for index, match in enumerate(added, present):
            better = None if match.row.result.failed else match.corrected()
            if better is not None:
                self.rows[index] = better
                self._tell("budget", self._run_row(index))

    def _run_row(self, index: int) -> str:
        """Run a row once; returns a message about it."""
        result, number = self.rows[index].result, self.finished
        name = f"round-{number}-{index}-{self.rows[index].name}"
        try:
            report = self._launch(index, "train", name, self._exports(index))
        except UserError as error:
            if index == 0:
                raise
            result.failed = str(error)
            return f"{error}; left out from here on"
        counted = number >= self.config.warmup
        result.runs.append(Run(number, self.seed, counted, report, f"{RUNS}/{name}"))
        self.judge.add(index, result)
        self._save(self.content(partial=True))
        return f"{result.name}: {figures.count(report['throughput']['samples_per_second'])} samples/s"

    def _exports(self, index: int | str) -> list[str]:
        parameters, predictions = self.judge.exports(index)
        return [
            "overwrite=true",  # each round's in place of the one before
            quoted("task.export_parameters", parameters),
            quoted("task.export_predictions", predictions),
        ]

    def _run_nudged(self) -> None:
        """Run the base row once more with each first weight moved to a neighbouring float32."""
        base = self.judge.base
        assert base is not None, "a row has been compared with it"
        seed = f"-seed-{self.seed}" if self.seed else ""
        name = f"rounding-{self.rows[base].name}{seed}"
        report = self._launch(base, "train", name, ["task.nudge=true", *self._exports(ROUNDING)])
        self.judge.add_rounding(report, self.finished, self.seed)

    def _show_so_far(self) -> None:
        """Show the tables of the finished rounds, and renew the page."""
        content = self.content(partial=True)
        self._save(content)
        self.files.write("compare.html", lambda path: comparison.write_html(content, path))
        tables = comparison.so_far(content)
        if self.console.is_terminal:
            self.progress.tables = tables
        else:
            for table in tables:
                self.console.print(table, markup=False, highlight=False)

    def _launch(self, index: int, task: str, name: str, extra: list[str]) -> dict[str, Any]:
        """Run a row's recipe with the round's seed and the arguments ``extra``."""
        row, directory = self.rows[index], self.out_dir / RUNS / name
        arguments = [
            *UNTIMED,
            *self.carried[row.name],
            f"task={task}",
            *(["task.page=false", "task.beside=null"] if task == "train" else []),
            *row.overrides(),
            *([f"seed={self.rows[0].result.report['recipe']['seed'] + self.seed}"] if self.seed else []),
            quoted("hydra.run.dir", directory),
            *extra,
        ]
        try:
            if self.config.minutes is None:
                report = self.launch(arguments, directory)
            else:
                report = self.launch(arguments, directory, seconds=self.ends - self.clock())
        except UserError as error:
            raise UserError(f"row '{row.name}': {error}") from error
        if task == "train" and (report.get("throughput") or {}).get("samples_per_second") is None:
            raise UserError(f"row '{row.name}': trained nothing (no speed in {directory / 'report.json'})")
        return report

    def content(self, partial: bool) -> dict[str, Any]:
        """compare.json's content from what is finished so far."""
        return {
            "schema": 1,
            "rows": compared.summarise([row.result for row in self.rows], self.rounds, self.judge.roundings),
            "rounding": compared.rounding(self.judge.roundings, self.judge.bases),
            "environment": self.environment,
            "repetitions": self.config.repetitions,
            "warmup": self.config.warmup,
            "counted": self.counted,
            "minutes": self.config.minutes,
            "out_of_time": self.out_of_time,
            "precision": self.config.precision,
            "precise": self._precise(),
            "seeds": self.config.seeds,
            "overrides": self.carried,
            "partial": partial,
        }

    def finish(self, partial: bool) -> dict[str, Any]:
        """Write and print the results so far; delete what runs have exported."""
        self.judge.close()
        content = self.content(partial)
        if any(row.result.runs for row in self.rows):
            self._save(content)
            comparison.print_result(content, self.console)
            # Runs leave out their own pages: the plots of every round would take longer than some runs.
            for shown in (row.result.shown for row in self.rows):
                directory = shown and shown.directory
                if directory and (self.out_dir / directory / "report.json").is_file():
                    self.files.write(f"{directory}/report.html", _write_page)
            page = self.out_dir / "compare.html"
            if self.files.write(page.name, lambda path: comparison.write_html(content, path)):
                terminal.print_place(page, self.console)
        return content

    def _save(self, content: Mapping[str, Any]) -> None:
        self.files.write_json("compare.json", as_json(content))
