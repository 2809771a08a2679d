"""Writes the files of a report, so that a failure of one affects neither the others nor the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recpipe.common.files import ELSEWHERE, unwritable
from recpipe.errors import UserError
from recpipe.report.record import write_json


class ReportFiles:
    """Writes files into ``directory`` and keeps the errors for ``check``."""

    def __init__(self, directory: Path, remedy: str = ELSEWHERE) -> None:
        self.directory, self.remedy = directory, remedy
        self.late: list[UserError] = []
        """Other errors after the run's work was done, which must not prevent its report."""
        self._faults: dict[Path, OSError] = {}

    def write(self, name: str, write: Callable[[Path], object]) -> bool:
        """Call ``write`` to make the file ``name``; returns whether it could. A later success removes an
        earlier error."""
        path = self.directory / name
        self._faults.pop(path, None)
        try:
            write(path)
        except OSError as fault:
            self._faults[path] = fault
            return False
        return True

    def write_json(self, name: str, content: Mapping[str, Any]) -> bool:
        """``write`` for a JSON file."""
        return self.write(name, lambda path: write_json(path, content))

    def check(self) -> None:
        """Raise a one-line UserError for all that could not be written."""
        lines = [str(error) for error in self.late]
        if self._faults:
            names = ", ".join(map(str, self._faults))
            lines.append(str(unwritable(names, next(iter(self._faults.values())), self.remedy)))
        if lines:
            raise UserError("; ".join(lines))
