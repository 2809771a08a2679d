"""Which samples train, which validate while training goes on, and which test at its end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NamedTuple
from zoneinfo import ZoneInfo

from recpipe.common.validation import Count, Text, mapping, one_of, typed
from recpipe.data.feature import UNITS
from recpipe.errors import DataError, UserError, shown

TRAIN, VALID, TEST = range(3)
WORDS = ("train", "valid", "test")
"""The values of a column that says the part, unless others are stated."""
OF_SHARES = {"user": "users", "random": "rows"}
"""The ways of which ``valid`` and ``test`` are shares."""
Bound = float | Text | tuple[Text, ...] | None


class Parts(NamedTuple):
    """How many samples each part has; they lie in this order."""

    train: int
    valid: int
    test: int

    def held_out(self, valid: float, test: float) -> Parts:
        """The same, with the latest shares of ``train`` moved: the last one to ``test``, the one before to
        ``valid``. ``DataError`` if none is left."""
        of_test = round(self.train * test)
        of_valid = round(self.train * valid)
        left = self.train - of_valid - of_test
        if left < 1:
            keys = f"data.eval_fraction={valid}" + f" and data.test_fraction={test}" * bool(test)
            leave = "leave" if test else "leaves"
            raise DataError(f"{keys} {leave} none of {self.train} samples for training")
        if test and not of_test:
            raise DataError(f"data.test_fraction={test} is less than one of {self.train} samples; raise it")
        return Parts(left, self.valid + of_valid, self.test + of_test)


@dataclass(frozen=True)
class Split:
    """``data.split``: the part of each row by the value of a ``column``, or at random.

    - ``time``: rows from ``valid`` on validate, and those from ``test`` on test. Both are times (ISO 8601,
      in ``zone`` if they have none), or numbers, with which the column's numbers are compared as they are.
      Numbers that are times have a ``unit``, text a ``format``, as of a feature of kind ``timestamp``.
    - ``user``: ``valid`` and ``test`` are shares of the column's different values, chosen by their hash.
    - ``random``: they are shares of the rows, chosen by the hash of each row's number and of ``seed``.
    - ``last``: so many of the last rows of each of the column's values test, and so many before these
      validate, in the order of the files, or of the column ``time``, whose values are as of ``by: time``.
      The first row of each trains.
    - ``column``: rows with the value, or one of the values, ``valid`` validate, and likewise ``test``; all
      others train. If none is stated the values are ``WORDS``, and others are faults.
    """

    by: Annotated[str, one_of("time", "user", "random", "last", "column")]
    column: str = ""
    valid: Bound = None
    test: Bound = None
    time: Text | None = None
    unit: Annotated[str, one_of(*UNITS)] | None = None
    format: Text | None = None
    zone: Text = "UTC"
    seed: Count = 0

    @classmethod
    def of(cls, values: object) -> Split:
        """From a mapping; ``UserError`` for one that cannot be used."""
        given = mapping(values, "data.split")
        # A whole number, or true, is a number here, as the command line writes it, and not a name.
        bounds = {key: float(given[key]) for key in ("valid", "test") if isinstance(given.get(key), int)}
        return typed(cls, {**given, **bounds}, "data.split")

    def __post_init__(self) -> None:
        if bool(self.column) == (self.by == "random"):
            needed = f"data.split.column has no value: by: {self.by} is by the values of one"
            raise UserError("data.split: by: random is by no column: leave it out" if self.column else needed)
        if self.seed and self.by != "random":
            raise UserError("data.split: seed is of by: random; other rows are chosen by their values")
        stated = {"valid": self.valid, "test": self.test}
        stated = {key: value for key, value in stated.items() if value is not None}
        if not stated and self.by != "column":
            example = {"time": "2026-03-01", "user": "0.1", "random": "0.1", "last": "1"}[self.by]
            raise UserError(
                f"data.split: by: {self.by} says no part; state valid: {example}, or test, or both"
            )
        for key, value in stated.items():
            if fault := self._fault(value):
                raise UserError(f"data.split.{key}={shown(value)}: {fault}")
        if self.by in OF_SHARES and sum(self.shares) >= 1:
            shares = f"{sum(self.shares):g} of the {OF_SHARES[self.by]}"
            raise UserError(f"data.split: valid and test are {shares}: none trains")
        if self.time is not None and self.by != "last":
            raise UserError("data.split: time is of by: last; the column of by: time is column")
        of_times = self.unit or self.format or self.zone != "UTC"
        if of_times and not (self.has_times or self.time):
            raise UserError(
                "data.split: unit, format and zone are of by: time with valid and test as times, and of the "
                "time of by: last"
            )
        self._require_zone()
        if self.by == "time" and len({isinstance(value, float) for value in stated.values()}) > 1:
            raise UserError("data.split: valid and test must both be times, or both be numbers")

    def _fault(self, value: Bound) -> str | None:
        """What is wrong with ``valid`` or ``test``."""
        if self.by in OF_SHARES:
            fits = isinstance(value, float) and 0 < value < 1
            return None if fits else f"must be a share of the {OF_SHARES[self.by]}, above 0 and below 1"
        if self.by == "last":
            fits = isinstance(value, float) and value >= 1 and value.is_integer()
            return None if fits else "must be how many of the last rows, 1 for example"
        if self.by == "time" and not isinstance(value, float):
            try:
                datetime.fromisoformat(value if isinstance(value, str) else "")
            except ValueError:
                return "is no time, as 2026-03-01 or 2026-03-01T12:00:00+01:00 is, and no number"
        return None

    def _require_zone(self) -> None:
        try:
            ZoneInfo(self.zone)
        except (OSError, ValueError, KeyError):
            raise UserError(f"data.split.zone={shown(self.zone)}: is no zone, as Europe/Berlin is") from None

    @property
    def compares_numbers(self) -> bool:
        """Whether ``by: time`` compares numbers, not times."""
        return self.by == "time" and isinstance(self.valid if self.valid is not None else self.test, float)

    @property
    def has_times(self) -> bool:
        """Whether the column's values are times."""
        return self.by == "time" and not self.compares_numbers

    @property
    def columns(self) -> list[str]:
        """The columns that say the part of a row."""
        return [name for name in (self.column, self.time) if name]

    @property
    def shares(self) -> tuple[float, float]:
        """``valid`` and ``test`` of ``by: user``, ``random`` and ``last``; 0 where none is stated."""
        valid, test = (value if isinstance(value, float) else 0.0 for value in (self.valid, self.test))
        return valid, test

    @property
    def is_by_words(self) -> bool:
        """Whether a column says ``WORDS``."""
        return self.by == "column" and self.valid is None and self.test is None

    @property
    def values(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The values, as text, of rows that validate, and of those that test."""
        if self.is_by_words:
            return (WORDS[VALID],), (WORDS[TEST],)
        valid, test = map(_words, (self.valid, self.test))
        return valid, test

    def require(self, parts: Parts, seen: str) -> None:
        """``DataError`` if no sample trains, or a part that is stated has none. ``seen``: the values that the
        column has."""
        stated = {TRAIN: True, VALID: self.is_by_words or self.valid is not None, TEST: self.test is not None}
        for part, count in enumerate(parts):
            if stated[part] and not count:
                found = ", ".join(f"{WORDS[n]} {each:,}" for n, each in enumerate(parts))
                where = f"column {shown(self.column)} has" if self.column else "there are"
                raise DataError(
                    f"data.split: no sample is for {WORDS[part]} ({found}); {where} {seen}: state others for "
                    "valid and test"
                )


def _words(value: Bound) -> tuple[str, ...]:
    if isinstance(value, float):
        return (str(int(value)) if value.is_integer() else str(value),)
    return (value,) if isinstance(value, str) else value or ()
