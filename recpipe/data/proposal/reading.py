"""How a column that may be a feature is read: its kind, what its values mean, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, exp, log10
from typing import Any, Literal
from zoneinfo import available_timezones

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.feature import WEIGHTED, Feature
from recpipe.data.proposal.column import OF_PAIRS, Column
from recpipe.data.proposal.names import PEOPLE_AND_THINGS, TIMES, kind_by_name, words_of
from recpipe.data.timestamps import MICROSECONDS_OF_A_DAY, read_times
from recpipe.errors import shown

FEW = 10
"""Whole numbers with so few values are kinds of something."""
EPOCHS = ((9e8, 2.2e9, "s"), (9e11, 2.2e12, "ms"), (9e14, 2.2e15, "us"))
"""The years 1998 to 2039 since 1970."""
MOST_WORDS = 1_000_000
"""Ids up to which each has a row of its own; more are hashed into ``ROWS_AN_ID`` rows for each."""
ROWS_AN_ID = 2


@dataclass(frozen=True)
class Read:
    """How a feature is read: the keys beside its name, and why."""

    keys: Mapping[str, Any]
    reason: str
    suspicions: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Unread:
    """Why a column is left out; ``told`` among the suspicions where it is more than uninteresting."""

    reason: str
    told: bool = False


def read(column: Column) -> Read | Unread:
    """How a column that may be a feature is read."""
    if column.content == "vector":
        return _as_vector(column)
    if column.content == "time" or (unit := _unit(column)) is not None:
        return _as_time(column, None if column.content == "time" else unit)
    if (row := _row_id(column)) is not None:
        return row
    if column.lists is not None:
        return _as_lists(column)
    if column.content == "bool":
        return Read({"kind": "dense"}, f"true in {percent(np.nanmean(column.numbers))}")
    kind, why = _kind(column)
    return _as_id(column, why) if kind == "id" else _as_number(column, why)


def _as_time(column: Column, unit: str | None) -> Read | Unread:
    """The hour and the weekday of times, as far as these come again."""
    stated: dict[str, Any] = {"unit": unit} if unit else {"format": "iso"} if column.is_text else {}
    zone = getattr(column.type, "tz", None)
    if zone and zone in available_timezones():
        stated["zone"] = zone
    found = read_times(column.values, Feature(column.name, "timestamp", parts=("hour",), **stated))
    if not found.valid.all():
        first = column.values[int(np.argmin(found.valid))].as_py()
        return Unread(f"times, of which some are not as 2026-03-01 12:00:00+01:00 ({shown(first)})", True)
    micros = found.micros[~found.missing]
    span = float(micros.max() - micros.min()) / MICROSECONDS_OF_A_DAY
    parts = ["hour"] * bool(span >= 1 and len(np.unique(micros // (MICROSECONDS_OF_A_DAY // 24) % 24)) > 1)
    parts += ["weekday"] * bool(span >= 7)
    if not parts:
        return Unread(f"times within {span:.2g} days: no hour and no weekday comes again")
    return Read(
        {"kind": "timestamp", "as": parts, **stated},
        f"times within {span:.3g} days: the {' and the '.join(parts)} in {stated.get('zone', 'UTC')}; "
        f"as: [age] says how long ago{_gaps(column)}",
    )


def _unit(column: Column) -> str | None:
    """The unit of whole numbers that are times since 1970; None: they are something else."""
    if column.content != "whole":
        return None
    values = column.numbers[~np.isnan(column.numbers)]
    if not TIMES.intersection(words_of(column.name)) and (np.diff(values) < 0).any():
        return None
    return next((unit for low, high, unit in EPOCHS if low < values.min() and values.max() < high), None)


def _as_vector(column: Column) -> Read:
    elements = column.present.flatten()
    size = len(elements) // len(column.present)
    large = float(pc.max(pc.abs(elements)).as_py() or 0) > 10
    keys = {"kind": "vector", "size": size} | ({"scale": "standard"} if large else {})
    return Read(keys, f"vectors of {size} numbers{_gaps(column)}")


def _row_id(column: Column) -> Unread | None:
    """A column with a value of its own in (nearly) each row."""
    if column.content not in ("whole", "text") or column.lists is not None:
        return None
    counted = column.counted
    if counted.total < 50 or counted.distinct < 0.99 * counted.total or _kind(column)[0] == "dense":
        return None
    rising = False
    if column.content == "whole":
        values = column.numbers[~np.isnan(column.numbers)]
        rising = bool((np.diff(values) > 0).all())
    if column.scale > 1 and not rising and PEOPLE_AND_THINGS.intersection(words_of(column.name)):
        return None
    what = "a number that rises from row to row" if rising else "a value of its own in every row"
    return Unread(f"{what}: a row's id, from which nothing is learned", told=True)


def _kind(column: Column) -> tuple[Literal["dense", "id"], str]:
    """Whether whole numbers are ids or numbers, and why."""
    if column.content != "whole":
        return ("id", "text") if column.content == "text" else ("dense", "numbers")
    if (named := kind_by_name(column.name)) is not None:
        return named, "an id by its name" if named == "id" else "a number by its name"
    values = column.numbers[~np.isnan(column.numbers)]
    if column.counted.distinct <= FEW:
        return "id", f"whole numbers with {column.counted.distinct} values"
    if values.min() < 0:
        return "dense", "whole numbers, some below 0"
    if _falls(values):
        return "dense", "whole numbers, large ones rare, as of counts (kind: id if they are ids)"
    return "id", "whole numbers all over their range, as of ids (kind: dense if they are amounts)"


def _falls(values: NDArray[np.float64]) -> bool:
    """Whether large numbers are rare and far apart, as of counts. Ids are all over their range, whichever of
    them are frequent."""
    distinct, counts = np.unique(values, return_counts=True)
    first, second = counts[: len(counts) // 2].sum(), counts[len(counts) // 2 :].sum()
    middle = float(np.median(distinct)) / float(distinct[-1])
    frequent = distinct[np.argmax(counts)] <= 2 and first > 10 * second
    return bool(middle < 0.1 or (frequent and middle < 0.45))


def _as_number(column: Column, why: str) -> Read:
    """Scaled so that most values are of the order of 1."""
    values = column.numbers[~np.isnan(column.numbers)]
    low, high = float(values.min()), float(values.max())
    keys: dict[str, Any] = {"kind": "dense"}
    reason = f"{why}, from {low:g} to {high:g}"
    if max(abs(low), abs(high)) > 10:
        scale, effect = _scale(values)
        keys["scale"] = scale
        reason += f"; {scale} {effect}"
    suspicions = _perhaps_missing(column.missing_numbers)
    if not column.is_text and (endless := int((np.isnan(column.numbers) & ~column.missing).sum())):
        suspicions.append(
            f"is infinite in {endless:,} rows, which are bad rows: data.on_bad_row=skip leaves them out"
        )
    if column.missing_words:  # which would be bad rows
        keys["missing"] = sorted(column.missing_words)
        suspicions.append(f"has {_listed(column.missing_words)} between its numbers: taken as missing")
    return Read(keys, reason + _gaps(column), tuple(suspicions))


def _scale(values: NDArray[np.float64]) -> tuple[str, str]:
    """The scale for numbers of which some are large, and what it does."""
    small = values / max(1e-300, float(np.abs(values).max()))  # whose powers are finite
    deviations = small - small.mean()
    skewness = (deviations**3).mean() / max(1e-300, float((deviations**2).mean()) ** 1.5)
    if abs(skewness) < 2:
        return "standard", "brings them around 0"
    return (
        ("log1p", "keeps large ones in bounds")
        if values.min() >= 0
        else (
            "log",
            "keeps large ones in bounds, and the sign",
        )
    )


def _as_id(column: Column, why: str) -> Read:
    keys: dict[str, Any] = {"kind": "id"}
    suspicions = []
    if column.is_text:
        keys["type"] = "integer" if column.content == "whole" else "text"
    if column.leading_zeros:
        why = "text, for some numbers have zeros in front"
        suspicions.append("has numbers with zeros in front (007), which are kept as text: 7 is another id")
    suspicions += _perhaps_missing(column.missing_numbers)
    if column.content == "whole" and column.missing_words:
        keys["missing"] = sorted(column.missing_words)
        suspicions.append(f"has {_listed(column.missing_words)} between its numbers: taken as missing")
    else:
        suspicions += _perhaps_missing(column.missing_words)
    table, room = _table(column)
    if column.counted.once > 0.5 and column.counted.total > 100:
        suspicions.append(
            f"{percent(column.counted.once)} of its values occur once in the sample: little is learned of "
            "these"
        )
    return Read(keys | table, f"{why}; {room}{_gaps(column)}", tuple(suspicions))


def _as_lists(column: Column) -> Read:
    kind = "sequence" if column.ordered or column.padding is not None else "multi_hot"
    kind = WEIGHTED if column.weighted else kind
    keys: dict[str, Any] = {"kind": kind}
    suspicions = []
    longest = int(column.lengths.max(initial=0))
    typical = float(np.median(column.lengths[~column.missing])) if (~column.missing).any() else 0.0
    reason = f"lists of up to {longest}, mostly about {typical:g}"
    if column.separator is not None:
        mark = column.separator
        keys |= {"separator": mark, "type": "integer" if column.whole_elements else "text"}
        shows = repr(mark)[1:-1]
        example = shown(next((str(v) for v in column.present.to_pylist() if mark in str(v)), ""))
        suspicions.append(
            f"is read as lists, split at '{shows}' ('{example}'); kind: id keeps each text whole"
        )
        reason = f"text of {reason}"
    if column.weighted:
        keys["weight_separator"] = OF_PAIRS
        suspicions.append(f"has a number after the '{OF_PAIRS}' of each id: it is read as the id's weight")
    if column.padding is not None:
        keys["padding"] = [column.padding]
        suspicions.append(
            f"is filled up with '{column.padding}' to one length: these are left out as padding"
        )
        reason += f", filled up with '{column.padding}'"
    if kind == "sequence":
        keys["max_length"] = max(1, int(np.quantile(column.lengths, 0.99)))
        reason += f"; {keys['max_length']} hold 99% of them"
    table, room = _table(column)
    return Read(keys | table, f"{reason}; {room}{_gaps(column)}", tuple(suspicions))


def _table(column: Column) -> tuple[dict[str, Any], str]:
    """How ids become rows of a table, and why: a row for each, as long as these fit well into memory."""
    seen = column.counted.distinct
    ids = max(1, column.distinct)
    about = f"{seen:,} ids" if ids == seen else f"about {_round_up(ids):,} ids ({seen:,} in the sample)"
    if ids <= MOST_WORDS:
        return {"ids": "vocabulary"}, f"{about}, a row for each"
    rows = min(_round_up(ROWS_AN_ID * ids), 2**31 - 1)
    sharing = 1 - exp(-(ids - 1) / (rows - 1))
    return {"rows": rows}, f"{about}, of which {percent(sharing)} share a row by hash"


def _round_up(number: float) -> int:
    """To two digits."""
    step = 10 ** max(0, int(log10(max(1, number))) - 1)
    return int(ceil(number / step) * step)


def _perhaps_missing(found: Mapping[str, int]) -> list[str]:
    if not found:
        return []
    words = ", ".join(f'"{word}"' for word in found)
    return [
        f"has {_listed(found)}: if that means missing, add missing: [{words}]; it is a value as it stands"
    ]


def _listed(words: Mapping[str, int]) -> str:
    return ", ".join(f"'{shown(word)}' in {count:,} rows" for word, count in [*words.items()][:3])


def _gaps(column: Column) -> str:
    share = float(column.missing.mean())
    return f"; missing in {percent(share)}" if share else ""


def percent(share: float | np.floating[Any]) -> str:
    """To two digits."""
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.4g}%"
