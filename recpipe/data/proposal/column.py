"""What a column of a sample holds: values, lists or text of lists, how many are missing, how many differ, and
what in it may mean something else than it says. Nothing is concluded here; ``choose`` does that."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.column_types import is_list, is_number, is_text, plain
from recpipe.data.columns import Int64, offsets_of
from recpipe.data.feature import Feature
from recpipe.data.proposal.names import is_ordered
from recpipe.data.text_values import NUMBER, WHOLE, Bools
from recpipe.data.values import parted, read_numbers

Content = Literal["nothing", "bool", "whole", "number", "text", "time", "date", "list", "vector", "other"]
"""``whole``: whole numbers, also as text or as doubles. ``date``: text whose day and month could be
swapped."""
_MISSING = r"na n/a #n/a nan null none nil unknown undefined missing \n - -- ? . (null) <na>"
MISSING_WORDS = frozenset(_MISSING.split()) | {"not set", "(not set)"}
"""Words that often stand for no value, in small letters."""
MISSING_NUMBERS = (-1, -99, -999, -9999, 999999, 2147483647)
"""The same of numbers, where all others are on one side of them."""
MARKS = ("|", "^", ";", "\x01", "\x02", "\x03", ",", " ")
"""What may stand between the ids of a text."""
PADS = ("0", "-1", "<pad>", "<PAD>", "[PAD]", "PAD", "pad", "")
ISO = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2})?(\.\d+)?( ?(Z|UTC|[+-]\d{2}:?\d{2}))?)?$"
SWAPPED = r"^\d{1,2}[/.-]\d{1,2}[/.-](\d{4}|\d{2})( .*)?$"
ZEROS = r"^[+-]?0[0-9]+$"
OF_PAIRS = ":"
"""Between an id and its weight."""
PAIR = r"^.+:[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class Counts:
    """How often the distinct values of a sample occur: int64 [d], in descending order."""

    counts: Int64

    @property
    def distinct(self) -> int:
        """How many values differ."""
        return len(self.counts)

    @property
    def total(self) -> int:
        """Values in all."""
        return int(self.counts.sum())

    @property
    def top(self) -> float:
        """The share of all values that the most frequent 1% of the distinct ones take (at least one)."""
        first = max(1, round(self.distinct / 100))
        return float(self.counts[:first].sum() / max(1, self.total))

    @property
    def once(self) -> float:
        """The share of all values that occur once."""
        return float((self.counts == 1).sum() / max(1, self.total))

    def estimated(self, scale: float) -> int:
        """Distinct values of ``scale`` times as many rows, by the guaranteed-error estimator (Charikar et
        al., PODS 2000): those seen once stand for sqrt(scale) others."""
        once = int((self.counts == 1).sum())
        return round(min(self.distinct - once + math.sqrt(max(1.0, scale)) * once, self.distinct * scale))


class Column:
    """A column of a sample, ``values`` [n] plain. ``scale``: how many rows there are for each of the
    sample; ``whole``: of each value that is there, all rows are."""

    def __init__(self, name: str, values: pa.Array, scale: float = 1.0, *, whole: bool = False) -> None:
        self.name, self.values, self.scale, self._whole = name, _as_text(values), scale, whole

    @property
    def type(self) -> pa.DataType:
        """As the files have it, plain."""
        return self.values.type

    @cached_property
    def missing(self) -> Bools:
        """Where there is no value: null, NaN, empty text."""
        nulls = np.asarray(self.values.is_null(nan_is_null=pa.types.is_floating(self.type)))
        return nulls | np.asarray(pc.fill_null(pc.equal(self.values, ""), True)) if self.is_text else nulls

    @property
    def is_text(self) -> bool:
        """Whether the file has it as text."""
        return bool(pa.types.is_large_string(self.type))

    @cached_property
    def present(self) -> pa.Array:
        """The values that there are."""
        return self.values.filter(pa.array(~self.missing))

    @cached_property
    def _words(self) -> tuple[pa.Array, Int64]:
        """Distinct values of text in UTF-8, and how often each occurs."""
        found = pc.value_counts(self.present)
        return found.field("values"), np.asarray(found.field("counts"))

    def _share(self, pattern: str) -> float:
        """The share of the values, words that mean missing aside, that are written so."""
        words, counts = self._words
        weights = counts * ~self._absent
        written = np.asarray(pc.match_substring_regex(words, pattern))
        return float((written * weights).sum() / max(1, weights.sum()))

    @cached_property
    def _absent(self) -> Bools:
        """Which of the distinct words may mean that there is no value."""
        words = pc.utf8_lower(self._words[0])
        return np.asarray(pc.is_in(words, value_set=pa.array(sorted(MISSING_WORDS), pa.large_string())))

    @cached_property
    def content(self) -> Content:
        """What its values are."""
        kind = self.type
        if not len(self.present):
            return "nothing"
        if is_list(kind):
            return self._content_of_lists()
        if pa.types.is_boolean(kind):
            return "bool"
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            return "time"
        if is_number(kind):
            whole = pa.types.is_integer(kind) or self._is_whole(self.numbers[~self.missing])
            return "whole" if whole else "number"
        return self._content_of_text() if self.is_text else "other"

    def _content_of_lists(self) -> Content:
        inner = plain(self.present.flatten())
        if not len(inner) - inner.null_count:
            return "nothing"
        if is_text(inner.type) or pa.types.is_integer(inner.type):
            return "list"
        if not is_number(inner.type):
            return "other"
        numbers = read_numbers(inner).values
        lengths = pc.list_value_length(self.present)
        same = pc.min(lengths).as_py() == pc.max(lengths).as_py()
        return "list" if self._is_whole(numbers) else "vector" if same else "other"

    @staticmethod
    def _is_whole(numbers: NDArray[np.float64]) -> bool:
        return bool(np.all((numbers == np.floor(numbers)) & (np.abs(numbers) < 2**63)))

    def _content_of_text(self) -> Content:
        if self._absent.all():
            return "text"
        if self._share(WHOLE) == 1:
            return "whole"
        if self._share(NUMBER) == 1:
            return "text" if self._share(ZEROS) else "number"
        if self._share(ISO) == 1:
            return "time"
        return "date" if self._share(SWAPPED) == 1 else "text"

    @cached_property
    def leading_zeros(self) -> bool:
        """Whether it is text of which some is a number with zeros in front, as in 007."""
        if not self.is_text or self.content != "text":
            return False
        return self._share(ZEROS) > 0 and self._share(r"^[+-]?[0-9]+$") > 0.95

    @cached_property
    def brackets(self) -> bool:
        """Whether its text is lists in brackets."""
        return self.content == "text" and self._share(r"^[\[({].*[\])}]$") > 0.95

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """The values as numbers, float64 [n], NaN where there is none."""
        if pa.types.is_date(self.type) or pa.types.is_timestamp(self.type):
            values = pc.cast(self.values.cast(pa.timestamp("us")), pa.int64()).cast(pa.float64(), safe=False)
            return np.asarray(pc.fill_null(values, np.nan))
        words = tuple(self.missing_words) if self.is_text else ()
        found = read_numbers(self.values, Feature(self.name, "dense", missing=words))
        return np.where(found.missing | ~found.valid | np.isinf(found.values), np.nan, found.values)

    @cached_property
    def missing_words(self) -> dict[str, int]:
        """Words of text that may mean that there is no value, and how often they occur."""
        if not self.is_text:
            return {}
        words, counts = self._words
        text = words.filter(pa.array(self._absent)).to_pylist()
        return dict(zip(text, counts[self._absent].tolist(), strict=True))

    @cached_property
    def missing_numbers(self) -> dict[str, int]:
        """Numbers that may mean the same: all others are on one side of them."""
        found: dict[str, int] = {}
        if self.content not in ("whole", "number"):
            return found
        values = self.numbers[~np.isnan(self.numbers)]
        for number in MISSING_NUMBERS:
            others = values[values != number]
            if not 0 < len(others) < len(values):
                continue
            if others.min() > max(number, -1) if number < 0 else others.max() < number / 10:
                found[str(number)] = len(values) - len(others)
        return found

    @cached_property
    def separator(self) -> str | None:
        """What seems to stand between several ids in its text."""
        if self.content not in ("text", "whole") or not self.is_text or self.brackets:
            return None
        words, counts = self._words
        for mark in MARKS:
            has = np.asarray(pc.match_substring(words, mark))
            if (has * counts).sum() < 0.05 * counts.sum():
                continue
            pieces = pc.split_pattern(words, mark).flatten()
            given = pieces.filter(pc.not_equal(pieces, ""))
            if _are_pairs(given):  # whose ids come again, whatever they weigh
                given = _ids_of(given)
            if mark in ", " and not pc.all(pc.match_substring_regex(given, WHOLE)).as_py():
                continue  # a comma or a space in prose
            if len(pc.unique(given)) < 0.7 * len(given):
                return mark
        return None

    @cached_property
    def lists(self) -> tuple[pa.Array, Int64] | None:
        """Of a column of lists: all elements, without their weights, and the offsets of each row's; else
        None."""
        if self._elements is None or not self.weighted:
            return self._elements
        return _ids_of(self._elements[0]), self._elements[1]

    @cached_property
    def _elements(self) -> tuple[pa.Array, Int64] | None:
        """The same, with their weights."""
        if self.content == "list":
            lengths = np.asarray(pc.fill_null(pc.list_value_length(self.values), 0)).astype(np.int64)
            return plain(self.values.flatten()), offsets_of(lengths)
        if self.separator is None:
            return None
        text = pc.if_else(pa.array(self.missing), pa.scalar(None, self.type), self.values)
        split = pc.split_pattern(text, self.separator)
        lengths = np.asarray(pc.fill_null(pc.list_value_length(split), 0)).astype(np.int64)
        return split.flatten(), offsets_of(lengths)

    @cached_property
    def codes(self) -> Int64:
        """A number for each distinct value, int64 [n]: -1 where it is missing. Of lists [m], of each
        element."""
        values = self.values if self.lists is None else self.lists[0]
        encoded = values.dictionary_encode()
        codes = np.asarray(pc.fill_null(encoded.indices, -1)).astype(np.int64)
        if self.lists is None:
            codes[self.missing] = -1
        return codes

    @cached_property
    def counted(self) -> Counts:
        """How often each value, or element of a list, occurs; padding is none."""
        counts = np.bincount(self.codes[(self.codes >= 0) & ~self.filled])
        return Counts(np.sort(counts[counts > 0])[::-1])

    @property
    def distinct(self) -> int:
        """About how many distinct values all rows have."""
        counted = self.counted
        return round(counted.distinct * self.scale) if self._whole else counted.estimated(self.scale)

    @cached_property
    def filled(self) -> Bools:
        """Which elements of lists are ``padding``."""
        if self.padding is None or self.lists is None:
            return np.zeros(len(self.codes), bool)
        return _is(self.lists[0], self.padding)

    @cached_property
    def padding(self) -> str | None:
        """What seems only to fill lists of one length up: it stands nowhere but at the end, or at the start,
        of each list."""
        if self.lists is None:
            return None
        elements, offsets = self.lists
        lengths = np.diff(offsets)
        lengths = lengths[lengths > 0]
        if len(lengths) < 20 or lengths.min() != lengths.max() or lengths[0] < 2:
            return None
        for word in PADS:
            pads = _is(elements, word)
            if pads.sum() < 0.01 * len(pads) or pads.all():
                continue
            steps = np.diff(pads.reshape(-1, lengths[0]).astype(np.int8), axis=1)
            if (steps >= 0).all() or (steps <= 0).all():
                return word
        return None

    @cached_property
    def lengths(self) -> Int64:
        """Elements of each row's list without padding, int64 [n]."""
        assert self.lists is not None
        offsets = self.lists[1]
        gone = np.concatenate(([0], np.cumsum(self.filled)))
        return np.diff(offsets) - np.diff(gone[offsets])

    @property
    def offered(self) -> Int64 | None:
        """Elements of each row's list, padding among them, int64 [n]; None if it has no lists."""
        return None if self._elements is None else np.diff(self._elements[1])

    @cached_property
    def lengths_of_numbers(self) -> Int64 | None:
        """How many numbers each row's list has that are no ids, int64 [n]; None if it has no such lists."""
        if self.content != "other" or not is_list(self.type) or not is_number(self.type.value_type):
            return None
        lengths = pc.fill_null(pc.list_value_length(self.values), 0)
        return np.asarray(lengths).astype(np.int64)

    @cached_property
    def ordered(self) -> bool:
        """Whether its lists are in an order that says something, by its name or by ids that come twice."""
        assert self.lists is not None
        if is_ordered(self.name):
            return True
        rows = np.repeat(np.arange(len(self.lengths)), np.diff(self.lists[1]))
        kept = ~self.filled
        pairs = np.stack([rows[kept], self.codes[kept]], 1)
        return len(np.unique(pairs, axis=0)) < 0.99 * len(pairs)

    @cached_property
    def weighted(self) -> bool:
        """Whether the elements of its text are pairs of an id and a weight, ``a:0.5``."""
        if self._elements is None or not is_text(self._elements[0].type):
            return False
        given = self._elements[0].filter(pc.not_equal(self._elements[0], ""))
        return _are_pairs(given)

    @cached_property
    def whole_elements(self) -> bool:
        """Whether the elements of its lists are whole numbers."""
        assert self.lists is not None
        elements = self.lists[0]
        if not is_text(elements.type):
            return True
        words = pc.unique(elements.filter(pc.not_equal(elements, "")).cast(pa.large_string()))
        return bool(len(words)) and bool(pc.all(pc.match_substring_regex(words, WHOLE)).as_py())


def _are_pairs(words: pa.Array) -> bool:
    """Whether all of some text is pairs of an id and a number."""
    return bool(len(words)) and bool(pc.all(pc.match_substring_regex(words, PAIR)).as_py())


def _ids_of(pairs: pa.Array) -> pa.Array:
    """The ids of pairs, and other text as it is."""
    return pc.list_element(parted(pairs, OF_PAIRS), 0)


def _as_text(values: pa.Array) -> pa.Array:
    """Strings and bytes in UTF-8 as ``large_string``; other values, and other bytes as bytes, as they are."""
    if not is_text(values.type):
        return values
    as_bytes = values.cast(pa.large_binary())
    try:
        return as_bytes.cast(pa.large_string())
    except pa.ArrowInvalid:
        return as_bytes


def _is(elements: pa.Array, word: str) -> Bools:
    """Where ``elements`` are ``word``, bool [n]."""
    if is_text(elements.type):
        return np.asarray(pc.fill_null(pc.equal(elements, word), False))
    if not re.match(NUMBER, word):
        return np.zeros(len(elements), bool)
    return np.asarray(pc.fill_null(pc.equal(elements.cast(pa.float64(), safe=False), float(word)), False))
