"""Times as files write them: dates, timestamps with and without a zone, numbers since 1970, and text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.column_types import is_text, plain
from recpipe.data.feature import NO_VALUE, UNITS, Feature
from recpipe.data.text_values import NUMBER, WHOLE, Bools
from recpipe.data.values import elements_of, read_numbers

if TYPE_CHECKING:
    from recpipe.data.columns import Int64

ISO = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d")
"""What ``format: iso`` mostly is; the rest is what Python's ``fromisoformat`` takes."""
EPOCH = datetime(1970, 1, 1)
FIRST, LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999, in microseconds."""
MICROSECONDS_OF_A_DAY = 86_400_000_000


@dataclass
class Times:
    """Microseconds since 1970 in UTC int64 [n], 0 where they are ``missing`` or not ``valid``, bool [n]."""

    micros: Int64
    missing: Bools
    valid: Bools

    def parts(self, feature: Feature) -> Int64:
        """The hour (0 to 23) or weekday (0 is Monday) int64 [n] in the feature's zone."""
        local = pa.array(self.micros).cast(pa.timestamp("us", feature.zone))
        found = pc.hour(local) if feature.parts == ("hour",) else pc.day_of_week(local)
        return np.asarray(found.to_numpy(zero_copy_only=False), np.int64)


def read_times(array: pa.Array, feature: Feature) -> Times:
    """The times of an array [n] of a type that ``refusal`` does not refuse; those without a zone are in the
    feature's. Of an hour that comes twice, as in autumn, the first is meant. Text without a format is a
    number in the feature's unit, or else in ISO 8601, as requests have times."""
    array = plain(array)
    kind, size = array.type, len(array)
    if pa.types.is_null(kind):
        return Times(np.zeros(size, np.int64), np.ones(size, bool), np.ones(size, bool))
    if is_text(kind):
        return _of_text(array, feature) if feature.format or not feature.unit else _of_digits(array, feature)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros = array.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
        if getattr(kind, "tz", None) is None:
            micros = _in_zone(micros, feature)
        missing = np.asarray(array.is_null())
        found = np.asarray(pc.fill_null(micros.cast(pa.int64()), 0).to_numpy(zero_copy_only=False))
        return _within(found, missing, np.ones(size, bool))
    return _of_numbers(array, feature)


@dataclass
class Ages:
    """``seconds`` float64 [n, size] from each of a sample's latest times until its own, the latest last, -1
    before the first; which samples have none, and which are ``valid``, bool [n]."""

    seconds: NDArray[np.float64]
    missing: Bools
    valid: Bools


def read_ages(array: pa.Array, now: Times, feature: Feature) -> Ages:
    """The ages, at the times ``now``, of an array [n] of lists of times, or of text of them; a time that is
    missing or later than now is not valid."""
    assert feature.size is not None
    elements, lengths = elements_of(array, feature)
    times, ends = read_times(elements, feature), lengths.cumsum()
    owners = np.repeat(np.arange(len(lengths)), lengths)
    bad = times.missing | ~times.valid | (times.micros > now.micros[owners])
    places = ends[:, None] - feature.size + np.arange(feature.size)
    there = places >= (ends - lengths)[:, None]
    micros = np.append(times.micros, 0)[np.where(there, places, -1)]
    seconds = np.where(there, (now.micros[:, None] - micros) / UNITS["s"], -1.0)
    return Ages(seconds, lengths == 0, np.bincount(owners[bad], minlength=len(lengths)) == 0)


def _of_numbers(array: pa.Array, feature: Feature) -> Times:
    """Of numbers since 1970, which text may hold as well."""
    kind, numbers = array.type, read_numbers(array, feature)
    scaled = numbers.values * UNITS[feature.unit or "s"]
    valid = numbers.valid & (scaled >= FIRST) & (scaled <= LAST)
    if pa.types.is_integer(kind) and feature.unit != "ns":  # exact beyond 2**53
        whole = pc.fill_null(array, 0).cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)
        return Times(np.where(valid, whole * int(UNITS[feature.unit or "s"]), 0), numbers.missing, valid)
    return Times(np.where(valid, np.floor(scaled), 0).astype(np.int64), numbers.missing, valid)


def _of_digits(text: pa.Array, feature: Feature) -> Times:
    """Of numbers written as text, the whole ones as exact as integers are, and of other text in ISO 8601."""
    none = pa.scalar(None, text.type)
    whole = pc.match_substring_regex(text, WHOLE)
    rest = pc.if_else(whole, none, text)
    other = pc.match_substring_regex(rest, NUMBER)
    parts = [
        _of_numbers(pc.if_else(whole, text, none).cast(pa.int64()), feature),
        _of_numbers(pc.if_else(other, rest, none), feature),
        _of_text(pc.if_else(other, none, rest), feature),
    ]  # a value is missing in all of them but one
    micros = np.sum([part.micros for part in parts], 0)
    missing = np.all([part.missing for part in parts], 0)
    return Times(micros, missing, np.all([part.valid for part in parts], 0))


def _of_text(array: pa.Array, feature: Feature) -> Times:
    array = array.cast(pa.large_string())
    absent = pc.is_in(array, value_set=pa.array([*NO_VALUE, *feature.missing], array.type))
    missing = np.asarray(pc.or_(absent, array.is_null()))
    size = len(array)
    micros, known, aware = np.zeros(size, np.int64), missing.copy(), np.zeros(size, bool)
    iso = feature.format in (None, "iso")
    for form in ISO if iso else (str(feature.format),):
        if {"%z", "%f", "%Z"} & {form[n : n + 2] for n in range(len(form))}:
            continue  # for Python, below
        parsed = pc.strptime(array, format=form, unit="s", error_is_null=True)
        # It takes February 30 for March 1: only what is written in the same way again is certain.
        same = np.asarray(pc.fill_null(pc.equal(pc.strftime(parsed, format=form), array), False)) & ~known
        seconds = np.asarray(pc.fill_null(parsed.cast(pa.int64()), 0).to_numpy(zero_copy_only=False))
        micros[same], known = seconds[same] * 1_000_000, known | same
    valid = np.ones(size, bool)
    for row in np.flatnonzero(~known).tolist():
        text = array[row].as_py()
        try:
            time = datetime.fromisoformat(text) if iso else _parsed(text, feature)
        except ValueError:
            valid[row] = False
            continue
        aware[row] = time.tzinfo is not None
        micros[row] = _micros(time)
    local = _in_zone(pa.array(micros).cast(pa.timestamp("us")), feature).cast(pa.int64())
    return _within(np.where(aware, micros, np.asarray(local)), missing, valid)


def _parsed(text: str, feature: Feature) -> datetime:
    return datetime.strptime(text, feature.format or "")


def _in_zone(naive: pa.Array, feature: Feature) -> pa.Array:
    return pc.assume_timezone(naive, feature.zone, ambiguous="earliest", nonexistent="earliest")


def _within(micros: Int64, missing: Bools, valid: Bools) -> Times:
    valid = valid & (micros >= FIRST) & (micros <= LAST)
    return Times(np.where(valid & ~missing, micros, 0), missing, valid | missing)


def _micros(time: datetime) -> int:
    if time.tzinfo is not None:
        time = time.astimezone(UTC).replace(tzinfo=None)
    return (time - EPOCH) // timedelta(microseconds=1)


def stated_time(feature: Feature) -> int | None:
    """Microseconds of the feature's ``now``, in its zone if it has none of its own; None: it is learned."""
    if feature.now is None:
        return None
    time = datetime.fromisoformat(feature.now)
    if time.tzinfo is not None:
        return _micros(time)
    (found,) = np.asarray(
        _in_zone(pa.array([_micros(time)]).cast(pa.timestamp("us")), feature).cast(pa.int64())
    )
    return int(found)
