"""Text that loops read is what pyarrow and the patterns make of it, and all other text is left to these."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from recpipe.data import separated, text, text_columns, text_values
from recpipe.data.config import FilesConfig
from recpipe.data.learned import bit_at
from recpipe.data.make import open_source
from recpipe.data.text_columns import TextColumns
from recpipe.errors import DataError

CELLS = ["", "a", "7", "abcdefg", "abcdefgh", "abcdefghi", " b ", "Zürich", "日本語", "x" * 40, "5'3\"", "\0"]
CELLS += [
    '""',
    '"q"',
    '"a,b"',
    '"two\nlines"',
    '"say ""hi"" twice"',
    '""""',
    '"\r"',
    '"sevenby"""',
    '"12345678"',
]
ODD = ['"a"b', '"a" ', '"open', "\r", "a\rb", "\n", "a,b", b"\xff".decode(errors="surrogateescape"), 'a"b']


def by_pyarrow(written: bytes, header: bool, wanted: list[str], quote: str | None) -> pa.Table:
    kinds = dict.fromkeys("abc", pa.string())
    return pa.csv.read_csv(
        pa.BufferReader(written),
        pa.csv.ReadOptions(column_names=list("abc"), skip_rows=int(header), block_size=len(written) + 1),
        pa.csv.ParseOptions(quote_char=quote or False, newlines_in_values=True),
        pa.csv.ConvertOptions(column_types=kinds, include_columns=wanted, strings_can_be_null=False),
    )


@pytest.mark.parametrize("quote", ['"', None])
def test_what_is_cut_is_what_pyarrow_reads(quote: str | None) -> None:
    """Also where records are damaged, and last values end where the text does."""
    rng, cut, left, refused = random.Random(3), 0, 0, 0
    cutters = {names: TextColumns("abc", list(names), ",", quote) for names in ("abc", "b", "ca")}
    for number in range(2500):
        odd = [rng.choice(ODD)] * (number % 3 == 0)
        lines = [[rng.choice(CELLS) for _ in "abc"] for _ in range(rng.randrange(1, 5))]
        for each in odd:
            rng.choice(lines)[rng.randrange(3)] = each
        end, header = rng.choice(["\n", "\r\n"]), rng.random() < 0.3
        written = "".join(",".join(line) + end for line in lines).encode(errors="surrogateescape")
        names = rng.choice(list(cutters))
        found = cutters[names](written, header)
        try:
            wanted = by_pyarrow(written, header, list(names), quote)
        except pa.ArrowInvalid:
            assert found is None, written
            refused += 1
            continue
        cut, left = cut + (found is not None), left + (found is None)
        assert found is None or found.equals(wanted), written
        for column in [] if found is None else found.columns:
            column.validate(full=True)
    assert cut > 400
    assert left > 50
    assert refused > 100


def test_a_header_and_a_blank_line_are_not_taken_for_others() -> None:
    cutter = TextColumns(["a", "b"], ["b"], ",", '"')
    found = cutter(b"a,b\n1,2\n3,4\n", True)
    assert found is not None
    assert found["b"].to_pylist() == ["2", "4"]
    for odd in (b"\na,b\n1,2\n", b"\r\n1,2\n", b"a\rb\n1,2\n", b"a,b\n"):
        assert cutter(odd, True) is None
    for odd in (b"1,2\n\n3,4\n", b"1,2\n\r\n", b"1,2", b"1\n", b"1,2,3\n", b'1,"2\n'):
        assert cutter(odd, False) is None
    assert TextColumns(["a"], ["a"], "§", None)(b"1\n", False) is None
    assert TextColumns(["a"], [], ",", None)(b"1\n", False) is None


def test_many_columns_of_which_few_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"c{n}" for n in range(300)]
    written = "".join(",".join(f"{row}.{n}" for n in range(300)) + "\n" for row in range(50)).encode()
    cutter = TextColumns(names, ["c299", "c7"], ",", '"')
    found = cutter(written, False)
    assert found is not None
    assert found.to_pydict() == {
        "c299": [f"{row}.299" for row in range(50)],
        "c7": [f"{row}.7" for row in range(50)],
    }
    monkeypatch.setattr(text_columns, "MOST_BYTES", 2 * len(written))
    assert cutter(written, False) is None, "its room has a bound"


def test_loops_that_stay_python_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    written = b'a,"b ""c"", d",7\r\nlonger than a word,"",-12\n'
    cutter = TextColumns("abc", list("abc"), ",", '"')
    compiled = cutter(written, False)
    monkeypatch.setattr(text_columns, "cut_records", text_columns.cut_records.loop)
    with np.errstate(over="ignore"):
        assert compiled is not None
        assert compiled.equals(cutter(written, False))


WORDS = ["007", "1e5", "+5", "-0", "-0.0", ".5", "5.", "0x10", "nan", "NaN", "inf", "-inf", "1e999", "1e-999"]
WORDS += [
    "1_0",
    '"1,5"',
    "٣",
    "x",
    "9007199254740993",
    "12345678901234567",
    "999999999999999999",
    "--1",
    "1e",
]
WORDS += [
    "1000000000000000000",
    "-1234567890123456",
    " 5",
    "5 ",
    '"\t5"',
    "",
    '""',
    '"7"',
    '"say ""5"""',
    "NA",
]
WORDS += [".", "-", "1e+", "1.5.2", "1E+05", "123456789012345678901.5", "9007199254740993.0", "1e281"]
WORDS += ["-1", "-1.00", "Zürich", "1-2", "12/4", "1:2", "12345678a"]


@pytest.mark.parametrize("skip", [True, False])
def test_samples_and_faults_are_the_same_whichever_way_a_block_is_read(
    skip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 300)
    monkeypatch.setattr(text_values, "LONG", 1)
    features: list[dict[str, Any]] = [
        {"name": "x", "kind": "dense", "missing": ["-1", "NA"]},
        {"name": "item", "rows": 90, "missing": ["-1"], "type": "integer"},
        {"name": "user", "rows": 90},
    ]
    described = {"labels": ["click"], "features": features}
    taken: list[bool] = []
    cut = TextColumns.__call__

    def watched(self: TextColumns, *given: Any) -> pa.Table | None:
        found = cut(self, *given)
        taken.append(found is not None)
        return found

    def read(file: Path) -> list[object]:
        source = open_source(
            FilesConfig(path=str(file), features=described, on_bad_row="skip" if skip else "raise")
        )
        made: list[object] = []
        try:
            for found, _ in source.blocks():
                absent = [bit_at(found.missing, place, len(found)).tolist() for place in range(2)]
                made += zip(found.dense.view(np.uint32).tolist(), found.ids.tolist(), *absent, strict=True)
        except DataError as fault:
            made.append(str(fault))
        return [*made, source.missing, source.rejected_rows]

    monkeypatch.setattr(TextColumns, "__call__", watched)
    different = set()
    for number, word in enumerate(WORDS):
        cells = [["1", "0.1", str(n * 37), f"u{n}"] for n in range(40)]
        cells[25][1] = cells[27][2] = cells[29][3] = word
        file = tmp_path / f"{number}.csv"
        file.write_text("\n".join(map(",".join, [["click", "x", "item", "user"], *cells])) + "\n")
        quick = read(file)
        with monkeypatch.context() as other:
            other.setattr(separated, "at_hand", lambda: False)
            other.setattr(text_values, "at_hand", lambda: False)
            before = len(taken)
            assert quick == read(file), word
            assert len(taken) == before, "pyarrow alone"
        different.add(str(quick))
    assert all(taken)
    assert len(different) > len(WORDS) // 2, "what is compared depends on the words"
