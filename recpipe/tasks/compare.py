"""task=compare: the recipes interleaved (A B C A B C ...), each run in a fresh process, never two at once."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

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
from recpipe.report.record import as_json
from recpipe.report.remarks import faults
from recpipe.setup.ctx import RunResult, TaskContext, find_device, refuse_ranks
from recpipe.tasks.compare_judge import ROUNDING, Judge
from recpipe.tasks.compare_rows import Row, at_equal_memory, carried_overrides, parse_rows
from recpipe.tasks.interleaved import RUNS, Interleaved, Launch
from recpipe.tasks.process import OutOfTime, interrupt_on_sigterm, run_apart
from recpipe.training.dense import try_out


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


class _Comparison(Interleaved):
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
        super().__init__(rows, carried, out_dir, launch, console)
        self.config, self.clock = config, clock
        self.ends = math.inf if config.minutes is None else clock() + 60 * config.minutes
        self.out_of_time = False
        """Whether ``compare.minutes`` has ended it."""
        self.judge = Judge(scratch_directory(out_dir, "parameters"))
        self.environment = environment()

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
        self.run_rows(label, rounds, first)

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
                self.tell("budget", self.run_row(index))

    def run_row(self, index: int) -> str:
        """Run a row once; returns a message about it."""
        result, number = self.rows[index].result, self.finished
        name = f"round-{number}-{index}-{self.rows[index].name}"
        try:
            report = self._train(index, name, self._exports(index))
        except UserError as error:
            return self.failed(index, error)
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
        report = self._train(base, name, ["task.nudge=true", *self._exports(ROUNDING)])
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

    def _train(self, index: int, name: str, extra: Sequence[str]) -> dict[str, Any]:
        """Train a row's recipe with the round's seed."""
        seed = [f"seed={self.rows[0].result.report['recipe']['seed'] + self.seed}"] if self.seed else []
        return self.launched(index, "train", name, [*seed, *extra])

    def start(self, arguments: list[str], directory: Path) -> dict[str, Any]:
        """Run recpipe with these arguments, for as long as ``compare.minutes`` allows."""
        if self.config.minutes is None:
            return super().start(arguments, directory)
        return self.launch(arguments, directory, seconds=self.ends - self.clock())

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
