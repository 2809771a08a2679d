"""What a recipe derives from the records of files before they are features (``data.joins``,
``data.sessions``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from recpipe.common.validation import FilePath, Positive, Text, one_of
from recpipe.errors import UserError, shown


@dataclass(frozen=True)
class Join:
    """The ``columns`` of a side table in ``path``, beside each record whose key it has; where it lacks the
    key, they are missing. ``columns`` (): all but the key. ``prefix`` comes before their names.

    ``on``: the column of the key, or ``{left: in the records, right: in the side table}``.
    """

    path: FilePath | list[FilePath]
    on: Text | dict[str, Text]
    columns: tuple[Text, ...] = ()
    prefix: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.on, str) and set(self.on) != {"left", "right"}:
            raise UserError(
                f"data.joins, {shown(self.path)}: on is the column of the key, or {{left: ..., right: ...}} "
                "where it has two names"
            )

    @property
    def left(self) -> str:
        """The column of the key in the records."""
        return self.on if isinstance(self.on, str) else self.on["left"]

    @property
    def right(self) -> str:
        """The column of the key in the side table."""
        return self.on if isinstance(self.on, str) else self.on["right"]


@dataclass(frozen=True)
class Sessions:
    """Events with the same value ``by`` are a session, in the order of ``order``, a column of numbers or
    times; None: of the files.

    A sample is an event with those before it: all events of a session (``target: next``), or its ``last``
    one, of those that are at least number ``min_length`` of it. Of the events before, at most ``max_length``
    are there, the ``last`` or the ``first`` (``keep``).
    """

    by: Text
    order: Text | None = None
    target: Annotated[str, one_of("next", "last")] = "next"
    max_length: Annotated[int, Interval(ge=1, le=2**20)] = 50
    min_length: Positive = 2
    keep: Annotated[str, one_of("first", "last")] = "last"
