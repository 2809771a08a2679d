"""The files of a report: one that cannot be written costs neither the others nor the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recpipe.common.run_dir import ELSEWHERE, unwritable
from recpipe.errors import UserError
from recpipe.report.record import write_json


class ReportFiles:
    """Writes files into ``directory`` and keeps what fails, for ``check`` to tell."""

    def __init__(self, directory: Path, remedy: str = ELSEWHERE) -> None:
        self.directory, self.remedy = directory, remedy
        self.late: list[UserError] = []
        """What else went wrong when the work was done, and must not cost its report."""
        self._faults: dict[Path, OSError] = {}

    def write(self, name: str, write: Callable[[Path], object]) -> bool:
        """Have ``write`` make the file ``name``; whether it could. A later success undoes a failure."""
        path = self.directory / name
        self._faults.pop(path, None)
        try:
            write(path)
        except OSError as fault:
            self._faults[path] = fault
            return False
        return True

    def write_json(self, name: str, content: Mapping[str, Any]) -> bool:
        """``write`` for a file of JSON."""
        return self.write(name, lambda path: write_json(path, content))

    def check(self) -> None:
        """Raise UserError, in one line, for all that could not be written."""
        lines = [str(error) for error in self.late]
        if self._faults:
            names = ", ".join(map(str, self._faults))
            lines.append(str(unwritable(names, next(iter(self._faults.values())), self.remedy)))
        if lines:
            raise UserError("; ".join(lines))
