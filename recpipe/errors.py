"""What went wrong, said to a user: the command line prints the message and exits with status 2."""

from __future__ import annotations

LONGEST = 40
"""Characters of a value that a message echoes."""


class UserError(Exception):
    """A mistake in a recipe, a file or a machine's set-up; the message names it and the remedy.

    Whatever it echoes (names of files and columns among it), the message is printable text: one line, or
    the ``lines`` that it was made of.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(printable, lines))

    def __str__(self) -> str:
        return "\n".join(self.args)


class DataError(UserError):
    """Bad input data; the message names file, row, column and value where they are known."""


class StoreError(UserError):
    """A cold store that cannot be used: read-only or full disk, torn rows, a crashed run's leftovers."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written."""


class ThroughHydra(BaseException):
    """Carries a user's error through Hydra, which catches ``Exception`` and would print around it."""

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error))
        self.error = error


def printable(text: str) -> str:
    """``text`` with what is no printable character escaped: line ends, terminal controls, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object, longest: int = LONGEST) -> str:
    """``value`` for a message: text, bytes (as UTF-8 where they are) or anything with a ``str``, printable
    and of at most ``longest`` characters."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    text = printable(text[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
