"""What a recipe derives from the records of files before they are features (``data.joins``,
``data.sessions``), and from prepared samples when they are put into batches (``data.negatives``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from recpipe.common.validation import FilePath, Positive, Text, one_of
from recpipe.errors import UserError, nearest_or_all, shown


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


@dataclass(frozen=True)
class Negatives:
    """Each sample is followed by ``ratio`` others with label 0, which differ from it in ``feature`` and those
    ``along``: there they are like a training sample that has another id of ``feature``.

    ``uniform``: each id is as likely; ``popularity``: as count**alpha in the training part. ``in_batch``:
    none are added; batches have ``log_q`` for models that take the other samples' ids.

    ``source``: the ids of the ``train`` part, or all of the side table that is ``joined`` by the feature's
    column, with the attributes that this has.
    """

    feature: Text
    along: tuple[Text, ...] = ()
    ratio: Annotated[int, Interval(ge=1, le=1024)] = 4
    sampling: Annotated[str, one_of("uniform", "popularity", "in_batch")] = "uniform"
    alpha: Annotated[float, Interval(ge=0, le=4)] = 0.75
    source: Annotated[str, one_of("train", "joined")] = "train"

    def place(self, one_hot: Sequence[str]) -> int:
        """Where ``feature`` is among those with one id a sample; ``UserError`` if it is none of them."""
        if self.feature not in one_hot:
            raise UserError(
                f"data.negatives.feature: no feature '{shown(self.feature)}' has one id a sample; "
                f"{nearest_or_all(self.feature, one_hot)}"
            )
        return one_hot.index(self.feature)

    @property
    def each(self) -> int:
        """How many samples one of the files becomes."""
        return 1 if self.sampling == "in_batch" else 1 + self.ratio

    @property
    def power(self) -> float:
        """An id's chance is as its count to this power."""
        return {"uniform": 0.0, "popularity": self.alpha, "in_batch": 1.0}[self.sampling]
