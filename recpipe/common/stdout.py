"""The command line's standard output: full, closed, or of an encoding that lacks characters."""

from __future__ import annotations

import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper


class Stdout(TextIOWrapper):
    """Standard output of the command line: a character that the terminal's encoding lacks is escaped, and the
    program goes on, after a line, if nothing can be written."""

    fault: OSError | None = None
    """Why something could not be written."""

    @classmethod
    def install(cls) -> Stdout | None:
        """Put one in the place of ``sys.stdout``; None if that is another program's object."""
        before = sys.stdout
        if type(before) is not TextIOWrapper or before is not sys.__stdout__:
            return None
        before.flush()
        # A buffer of its own: that of before may have been made for another file under the same number.
        buffer = BufferedWriter(FileIO(before.fileno(), "w", closefd=False))
        sys.stdout = made = cls(
            buffer,
            before.encoding,
            "backslashreplace",
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        return made

    def write(self, text: str) -> int:
        """Write ``text``."""
        try:
            return super().write(text)
        except OSError as fault:
            self._lost(fault)
            return len(text)

    def flush(self) -> None:
        """Write what is left."""
        try:
            super().flush()
        except OSError as fault:
            self._lost(fault)

    def _lost(self, fault: OSError) -> None:
        if not isinstance(fault, BrokenPipeError):
            self.fault = fault
            print(f"error: cannot write standard output: {fault.strerror}", file=sys.stderr)
        nobody_reads()


def nobody_reads() -> None:
    """Discard further output, so that printing does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
