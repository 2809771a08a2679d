"""Numbers that loops read in text are those next to what it says, and what they leave is read by others."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from decimal import Decimal
from math import inf, nextafter

import numpy as np
import pyarrow as pa
import pytest

from recpipe.data import text_values
from recpipe.data.number_loops import decimal_numbers
from recpipe.data.text_values import DECIMAL_NUMBERS, NAN, NUMBER, WHOLE, WHOLE_NUMBERS, TextReader

ODD = [
    "",
    ".",
    "-",
    "-.",
    "+5",
    "--5",
    "5-",
    "5+5",
    "1e",
    "1e+",
    "e5",
    "1e5e5",
    "1.2.3",
    "1,5",
    " 5",
    "5 ",
    "5\n",
]
ODD += [
    "inf",
    "-inf",
    "nan",
    "NaN",
    "nan(1)",
    "infinity",
    "0x10",
    "1_0",
    "1d5",
    "٣",
    "5\0",
    "1e٣",
    "/",
    ":",
    "1/",
    "1:",
]
ODD += [
    "1e999",
    "1e-999",
    "1e281",
    "1e-281",
    "1e99999999999999999999",
    "0e999",
    "5e-324",
    "1.7976931348623157e308",
]


def numbers(rng: random.Random, count: int) -> Iterator[str]:
    """Texts of numbers, of all lengths and sizes, as programs write them and as these do not."""
    for _ in range(count):
        digits = "".join(rng.choices("0123456789", k=rng.randrange(1, 24)))
        point = rng.randrange(len(digits) + 1)
        exponent = rng.choice(["", "", "", f"e{rng.randrange(-300, 300)}", f"E+0{rng.randrange(30)}"])
        yield rng.choice(["", "-"]) + digits[:point] + rng.choice(["", "."]) + digits[point:] + exponent
        number = np.uint64(rng.getrandbits(64)).view(np.float64)
        yield repr(float(number if np.isfinite(number) else 1.0))
        yield rng.choice(["{!r}", "{:.6f}", "{:.15g}", "{:.17g}", "{:e}"]).format(rng.lognormvariate(0, 5))
        yield "0" * rng.randrange(30) + "." + "0" * rng.randrange(30) + digits[:18] + "0" * rng.randrange(3)


def middles(rng: random.Random, count: int) -> Iterator[str]:
    """What lies in the middle between two numbers of float64, and close to it."""
    for _ in range(count):
        low = float(rng.randrange(2**53, 2**62)) * 2.0 ** rng.randrange(-12, 3)
        middle = (Decimal(low) + Decimal(nextafter(low, inf))) / 2
        for digits in (15, 17, 19, 25):
            yield f"{middle:.{digits}g}"
        yield from (str(int(middle) + more) for more in (-1, 0, 1))
        yield f"{middle:f}"


def read(words: list[str]) -> np.ndarray | None:
    encoded = [word.encode() for word in words]
    found = np.empty(len(words), np.uint64)
    data = np.frombuffer(b"".join(encoded), np.uint8)
    plainly = decimal_numbers(data, np.cumsum([0, *map(len, encoded)], dtype=np.int32), found)
    return found if plainly else None


def bits(number: float) -> int:
    return int(np.float64(number).view(np.uint64))


@pytest.mark.parametrize("count", [1000, pytest.param(40_000, marks=pytest.mark.soak)])
def test_numbers_are_the_nearest_ones_bit_by_bit(count: int) -> None:
    rng = random.Random(7)
    taken = dict.fromkeys(("numbers", "middles"), 0)
    for kind, words in (("numbers", numbers(rng, count)), ("middles", middles(rng, count // 10))):
        total = 0
        for word in words:
            found, total = read(["12.5", word, "-3"]), total + 1
            if found is not None:
                taken[kind] += 1
                assert re.fullmatch(NUMBER, word), word
                assert found.tolist() == [bits(12.5), bits(float(word)), bits(-3.0)], word
        assert taken[kind] > total // 3, kind
    assert taken["numbers"] > 3 * count


def test_what_is_left_to_others_is_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_values, "LONG", 1)
    rng = random.Random(8)
    words = [*ODD, *numbers(rng, 60), *middles(rng, 10)]
    for word in words:
        array = pa.array(["7", word, "-0", ""]).slice(1)
        missing = np.array([word == "", False, True])
        quick = DECIMAL_NUMBERS(array, missing)
        with monkeypatch.context() as patch:
            patch.setattr(text_values, "at_hand", lambda: False)
            slow = DECIMAL_NUMBERS(array, missing)
        for one, other in zip(quick, slow, strict=True):
            assert one.tobytes() == other.tobytes() or np.isnan(one[0]), word
        assert quick[1].tolist() == [word == "" or bool(re.fullmatch(f"{NUMBER}|{NAN}", word)), True, True], (
            word
        )


def test_usual_numbers_are_left_to_nobody() -> None:
    """As Python, pyarrow and C write them."""
    rng = random.Random(9)
    values = [rng.lognormvariate(0, 5) * rng.choice([1, -1]) for _ in range(500)] + [0.0, -0.0, 1e12, 1e-5]
    words = [form.format(each) for each in values for form in ("{!r}", "{:f}", "{:e}", "{:g}", "{:.17g}")]
    words += [str(each) for each in pa.array([*values, 1e16, 1e22, 1e-100]).cast(pa.string()).to_pylist()]
    words += [str(rng.randrange(10 ** rng.randrange(1, 20))) for _ in range(500)]
    assert read(words) is not None


def test_empty_text_is_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_values, "LONG", 1)
    array = pa.array(["", "12", "", "-7"])
    missing = np.array([True, False, True, False])
    monkeypatch.setattr(TextReader, "_of_present", None)
    assert WHOLE_NUMBERS(array, missing)[0].tolist() == [0, 12, 0, -7]
    found, valid = DECIMAL_NUMBERS(array, missing)
    assert found[[1, 3]].tolist() == [12.0, -7.0]
    assert np.isnan(found[[0, 2]]).all()
    assert valid.all()


def test_whole_numbers_are_those_of_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_values, "LONG", 1)
    rng = random.Random(4)
    words = [word for word in ODD if word] + [
        "007",
        "-0",
        "0",
        "12/4",
        "1:2",
        "12345678a",
        "999999999999999999",
    ]
    words += [
        str(rng.randrange(10**digits) * rng.choice([1, -1])) for digits in range(1, 19) for _ in range(30)
    ]
    for word in words:
        found, valid = WHOLE_NUMBERS(pa.array(["12", word, "-3"]).slice(1), np.zeros(2, bool))
        is_whole = re.fullmatch(WHOLE, word) is not None and "\n" not in word
        assert valid.tolist() == [is_whole, True], word
        assert found.tolist() == [int(word) if is_whole else 0, -3], word


def test_loops_that_stay_python_read_the_same() -> None:
    words = ["0.1", "-12.5e-3", "12345678901234567", "1e-7", "", "0.30000000000000004", "0"]
    data = np.frombuffer("".join(words).encode(), np.uint8)
    offsets = np.cumsum([0, *map(len, words)])
    found = np.empty(len(words), np.uint64)
    with np.errstate(over="ignore"):
        assert decimal_numbers.loop(data, offsets, found)
    assert found.view(np.float64).tolist() == [float(word or 0) for word in words]
