"""What went wrong, said to a user: the command line prints the message and exits with status 2."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 40
"""Characters of a value that a message echoes."""
MOST_CHOICES = 20
"""Names that a message lists."""


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


class BadRow(DataError):
    """A row of the input that cannot be used, which ``data.on_bad_row=skip`` leaves out where a
    task allows that.

    ``fault`` is the message without a remedy, for tasks that need every row.
    """

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault}; correct it, or leave bad rows out with data.on_bad_row=skip")
        self.fault = fault


class StoreError(UserError):
    """A cold store that cannot be used: read-only or full disk, torn rows, a crashed run's leftovers."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written."""


class Interruption(BaseException):
    """A signal ends the run: raised where it came, also inside code of others, which must let it pass."""


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


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """For a message about an unknown ``word``: `` Did you mean 'x'?``, or nothing where none is near."""
    near = get_close_matches(word[:200], list(words), n=1)
    return f" Did you mean '{shown(near[0], 200)}'?" if near else ""


def nearest_or_all(word: str, words: Iterable[str]) -> str:
    """A remedy for an unknown ``word``: ``did you mean x?``, or all of ``words`` where none is near."""
    names = list(words)
    near = get_close_matches(word[:200], names, n=1)
    if near:
        return f"did you mean {shown(near[0])}?"
    more = f" and {len(names) - MOST_CHOICES} more" if len(names) > MOST_CHOICES else ""
    return f"choose one of {', '.join(map(shown, names[:MOST_CHOICES]))}{more}"
