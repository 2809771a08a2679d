"""Recipes run in turn (A B C A B C ...), each in a fresh process, never two at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from recpipe.common.words import quoted
from recpipe.errors import UserError
from recpipe.report.files import ReportFiles
from recpipe.tasks.compare_rows import Row

UNTIMED = ("trainer.checkpoint_every=null", "trainer.eval_every=1.0")
"""Overrides that switch off what costs time but is not compared. The user's own come later and win."""
RUNS = "runs"
"""The folder of the runs' directories in that of the whole."""
Launch = Callable[..., dict[str, Any]]
"""Runs ``python -m recpipe`` with these arguments, list[str], in this directory, Path; returns its
report.json, or {} if there is none. Where time is limited it is told the ``seconds`` that are left as well,
and raises ``OutOfTime`` after them."""


class _Bar(Progress):
    """The bar of the rounds; on a terminal the tables of the rounds so far stand above it."""

    tables: Sequence[RenderableType] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from self.tables
        yield from super().get_renderables()


class Interleaved(ABC):
    """Rounds of runs, one of each row in turn.

    ``carried``: the user's own overrides by row name. A row whose run fails is left out from then on; if the
    first row's fails, the whole ends.
    """

    def __init__(
        self, rows: list[Row], carried: dict[str, list[str]], out_dir: Path, launch: Launch, console: Console
    ) -> None:
        self.rows, self.carried, self.launch, self.console = rows, carried, launch, console
        self.out_dir = out_dir
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = _Bar(*columns, console=console)
        self.bar = self.progress.add_task("comparing", total=None)
        self.finished = 0
        """Rounds, warm-up included, in which every row has run."""
        self.files = ReportFiles(out_dir)

    @abstractmethod
    def run_row(self, index: int) -> str:
        """Run row number ``index`` once; returns a message about it."""

    def check_rows(self) -> None:
        """Assemble every recipe once (task=plan), so that a clash is reported now and not after hours."""
        for index, row in enumerate(self.rows):
            if row not in self.rows[:index]:
                self.launched(index, "plan", f"plan-{index}-{row.name}", [])

    def run_rows(self, label: str, rounds: int, first: int = 0) -> None:
        """A round's runs of the rows from number ``first`` on; ``rounds``: of how many."""
        for index in range(first, len(self.rows)):
            row = self.rows[index]
            total = rounds * len(self.rows)
            self.progress.update(self.bar, description=f"{label}: {row.name}", total=total)
            if row.result.failed is None:
                self.tell(label, self.run_row(index))
            self.progress.advance(self.bar)

    def tell(self, label: str, text: str) -> None:
        """Print a line above the bar."""
        self.progress.console.print(f"{label:>10}  {text}", markup=False, highlight=False)

    def failed(self, index: int, error: UserError) -> str:
        """Leave the row out from here on, and return a message; raise ``error`` again if it is the first."""
        if index == 0:
            raise error
        self.rows[index].result.failed = str(error)
        return f"{error}; left out from here on"

    def launched(self, index: int, task: str, name: str, extra: Sequence[str]) -> dict[str, Any]:
        """Run a row's recipe in the folder ``name`` with the arguments ``extra``; returns its report."""
        row, directory = self.rows[index], self.out_dir / RUNS / name
        arguments = [
            *UNTIMED,
            *self.carried[row.name],
            f"task={task}",
            *(["task.page=false", "task.beside=null"] if task == "train" else []),
            *row.overrides(),
            quoted("hydra.run.dir", directory),
            *extra,
        ]
        try:
            report = self.start(arguments, directory)
        except UserError as error:
            raise UserError(f"row '{row.name}': {error}") from error
        if task == "train" and (report.get("throughput") or {}).get("samples_per_second") is None:
            raise UserError(f"row '{row.name}': trained nothing (no speed in {directory / 'report.json'})")
        return report

    def start(self, arguments: list[str], directory: Path) -> dict[str, Any]:
        """Run recpipe with these arguments."""
        return self.launch(arguments, directory)
