"""What went wrong, said to a user: the command line prints the message and exits with status 2."""


class UserError(Exception):
    """A mistake in a recipe, a file or a machine's set-up; the message names it and the remedy."""


class DataError(UserError):
    """Bad input data; the message names file, row, column and value where they are known."""


class StoreError(UserError):
    """A cold store that cannot be used: read-only or full disk, torn rows, a crashed run's leftovers."""


def shown(value: object, limit: int = 40) -> str:
    """``value`` for a message: in one line, control characters escaped, cut at ``limit`` characters."""
    text = str(value)
    cut = text[:limit] + ("..." if len(text) > limit else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
