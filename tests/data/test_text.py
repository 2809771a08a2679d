"""Text is read as it is written, wherever its blocks are cut, and types of JSON that change are told."""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recpipe.data import json_lines, text
from recpipe.data.feature import Feature
from recpipe.data.files import TextRules
from recpipe.data.listing import input_files
from recpipe.data.records import InputFile
from recpipe.data.sources.transforms import string_keys
from recpipe.data.text_values import NUMBER, WHOLE
from recpipe.data.values import read_ids, read_numbers
from recpipe.errors import DataError

WORDS = ["Zürich", "Kraków", "日本語", "😀 and 😀", "a, b", 'say "hi"', "two\nlines", "", "007"]


def read(file: InputFile) -> dict[str, list[object]]:
    names = file.columns.names
    blocks = [block.rows for block in file.blocks(names)]
    return pa.Table.from_batches(blocks, blocks[0].schema).to_pydict()


def quoted(word: str) -> str:
    return '"' + word.replace('"', '""') + '"'


@pytest.mark.parametrize("block", [64, 101, 1 << 20])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-8-sig", "shift-jis", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_characters_line_ends_and_quotes_over_blocks(
    end: str, encoding: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in WORDS * 8 if word.encode(encoding, errors="replace").decode(encoding) == word]
    lines = ["word,number", *(f"{quoted(word)},{n}" for n, word in enumerate(words))]
    file = tmp_path / "words.csv"
    file.write_bytes((end.join(lines) + end).encode(encoding))
    monkeypatch.setattr(text, "BLOCK_BYTES", block)
    (found,) = input_files(str(file), rules=TextRules(encoding=encoding))
    assert read(found) == {"word": words, "number": [str(n) for n in range(len(words))]}


def test_a_record_ends_where_no_quote_is_open() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        data = bytes(rng.choice(b'ab"\n') for _ in range(rng.randrange(30)))
        ends = [n + 1 for n, byte in enumerate(data) if byte == 10 and data[:n].count(b'"') % 2 == 0]
        begin = rng.randrange(4)
        whole = bytearray(b'a"\n'[:begin] + data + b'"\n')
        for quote, wanted in ((b'"', max(ends, default=0)), (None, data.rfind(b"\n") + 1)):
            found = text._last_end(whole, quote, begin, begin + len(data))
            assert max(found, begin) == begin + wanted


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    rooms = text._Rooms()
    room = rooms.take(100)
    assert rooms.take(50) is room
    held = [memoryview(room)[3:5], np.frombuffer(room, np.uint8)[:1], pa.py_buffer(memoryview(room)[:2])]
    while held:
        other = rooms.take(100)
        assert other is not room
        held.pop()
    assert rooms.take(100) is room
    assert rooms.take(500) is not room


@pytest.mark.parametrize(
    ("content", "encoding", "said"),
    [
        ("a,b\n1,2\n".encode("utf-16"), "utf-8", "pass data.encoding=utf-16"),
        ("a,b\n1,2\n".encode("utf-16")[:-1], "utf-16", "is not text in utf-16"),
        (b"a,b\n1,2\n", "klingon", "no encoding is called klingon"),
        (b"a,b\n1,2\n", "hex", "no encoding is called hex"),
    ],
)
def test_text_in_another_encoding_is_one_line(
    content: bytes, encoding: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read(input_files(str(file), rules=TextRules(encoding=encoding))[0])
    assert str(file) in str(caught.value)


def json_file(tmp_path: Path, rows: list[object]) -> InputFile:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return input_files(str(file))[0]


def test_types_of_json_are_those_of_the_first_rows_with_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 400)
    rows = [{"id": n, "tags": [], "city": None, "price": n} for n in range(20)]
    rows += [{"id": n, "tags": ["a", "b"], "city": "x", "price": n + 0.5} for n in range(20)]
    found = json_file(tmp_path, [*rows])
    assert found.columns.field("city").type == pa.string()
    assert found.columns.field("tags").type == pa.list_(pa.string())
    blocks = [block.rows for block in found.blocks(["id", "tags", "city", "price"])]
    assert len(blocks) > 3
    assert [row for block in blocks for row in block.to_pylist()] == rows
    assert {block.schema.field("price").type for block in blocks} == {pa.int64(), pa.float64()}
    monkeypatch.setattr(json_lines, "LOOKED_AT", 1)  # the control: looking at one block finds no type
    assert pa.types.is_null(json_file(tmp_path, [*rows]).columns.field("city").type)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"a": 1}] * 60 + [{"a": "x"}], "row 61, column a: x is text, and row 1 has a number"),
        (
            [{"a": None}, {"a": "x"}] * 30 + [{"a": [1]}],
            r"row 61, column a: \[1\] is a list .*, and row 2 has text",
        ),
        ([{"a": 1}, {"a": "x"}], "row 2, column a: x is text, and row 1 has a number"),
        ([{"a": 1}] * 60 + [3], "row 61: '3' is not an object"),
    ],
)
def test_a_type_that_changes_is_one_line_with_both_rows(
    rows: list[object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 200)
    with pytest.raises(DataError, match=said) as caught:
        read(json_file(tmp_path, rows))
    assert "\n" not in str(caught.value)


def test_folders_as_huggingface_has_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("a card")
    for n in (0, 1, 10):
        (tmp_path / "data" / f"train-{n:05}-of-00011.csv").write_text("a,b\n1,2\n")
    names = [file.path.name for file in input_files(str(tmp_path))]
    assert names == [f"train-{n:05}-of-00011.csv" for n in (0, 1, 10)]
    (tmp_path / "data" / "test-00000-of-00001.csv").write_text("a,b\n1,2\n")
    told = r"holds the splits train, test.*data.path='.*/data/train\*' data.test_path='.*/data/test\*'$"
    with pytest.raises(DataError, match=told):
        input_files(str(tmp_path))
    assert len(input_files(str(tmp_path / "data" / "train*"))) == 3


WRITTEN = (
    "0 7 -7 007 -0 +7 7.0 1e3 0x1F 999999999999999999 1000000000000000000 -999999999999999999 . 1. .5 -.5 1e "
    "9223372036854775807 99999999999999999999 1e+5 1E-5 1e999 Nan inf -inf infinity 1_000 True 1,5 12e4.5 -- "
    "- + e5 1.2.3 +.5e1 1e-999 -1e999"
)
SPELLINGS = [*WRITTEN.split(" "), " 7", "7 ", "7\n", "1\x00"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_numbers_in_text_are_those_of_the_patterns(kind: pa.DataType) -> None:
    """Each by itself, so that the faster way is taken wherever it can be, and all together."""
    whole, number = Feature("x", type="integer"), Feature("x", "dense")
    for spelling in SPELLINGS:
        ids = read_ids(pa.array([spelling], kind), whole)
        is_whole = re.fullmatch(WHOLE.strip("^$"), spelling, re.ASCII) is not None
        assert ids.valid.tolist() == [is_whole], spelling
        assert not is_whole or ids.keys.tolist() == [int(spelling)]
        numbers = read_numbers(pa.array([spelling], kind), number)
        is_number = re.fullmatch(NUMBER.strip("^$"), spelling, re.ASCII) is not None
        assert numbers.missing.tolist() == [spelling == "Nan"]
        assert numbers.valid.tolist() == [is_number or spelling == "Nan"], spelling
        assert not is_number or numbers.values.tolist() == [float(spelling)]
    together = read_ids(pa.array(["5", None, "", "x", "-12"], kind), whole)
    assert together.keys.tolist() == [5, 0, 0, 0, -12]
    assert together.valid.tolist() == [True, True, True, False, True]
    assert together.missing.tolist() == [False, True, True, False, False]


def test_keys_of_text_are_those_of_its_bytes_whether_they_are_utf8_or_not() -> None:
    words = ["Zürich".encode(), b"\xff\xfe", b"", b"007"]
    as_text = pa.array(words, pa.binary()).view(pa.string())
    keys, valid = string_keys(as_text)
    assert valid.tolist() == [True, False, True, True]
    alone = [string_keys(pa.array([word], pa.binary()))[0][0] for word in words]
    assert keys.tolist() == alone
    assert string_keys(pa.array([], pa.string()))[0].dtype == np.uint64


@pytest.mark.parametrize(
    "word", ["007", "-0", "0x10", "0XFFFFF", "1e5", "+5", " 5", "5 ", "1_0", "٣", "nan", "9" * 19]
)
@pytest.mark.parametrize("others", [[], ["0", "-5", "12"], ["9" * 18, "-" + "9" * 18]])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_one_word_that_is_no_whole_number_among_others(
    word: str, others: list[str], kind: pa.DataType
) -> None:
    """Though pyarrow reads some of them as numbers, and hexadecimal ones may be as long as these."""
    feature = Feature("n", type="integer")
    whole = read_ids(pa.array([*others, "7"]).cast(kind).slice(0, len(others)), feature)
    assert (whole.keys.tolist(), whole.valid.all()) == ([int(own) for own in others], True)
    found = read_ids(pa.array(["1", *others, word]).cast(kind).slice(1), feature)
    assert found.valid.tolist() == [True] * len(others) + [False]
    assert found.keys[:-1].tolist() == whole.keys.tolist()


def threads_that_parse() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("recpipe-parse")]


def csv_file(folder: Path, lines: list[str]) -> InputFile:
    file = folder / "rows.csv"
    file.write_text("\n".join(["a,b", *lines]) + "\n")
    return input_files(str(file))[0]


def test_rows_come_in_order_and_parsing_ends_with_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 64)
    file = csv_file(tmp_path, [f'{n},"{n}\n"' for n in range(500)])
    firsts, names = [], []
    blocks = file.blocks(["a"])
    for block in blocks:
        assert block.rows["a"].to_pylist()[0] == str(block.first_row - 1)
        firsts.append(block.first_row)
        names += threads_that_parse()
        if len(firsts) == 40:
            break
    assert names, "it is parsed beside the reader"
    assert firsts == sorted(set(firsts))
    blocks.close()
    assert not threads_that_parse()
    assert read(file)["b"] == [f"{n}\n" for n in range(500)]
    assert not threads_that_parse()


def test_the_first_of_several_faults_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what lies behind it is read, and parsed, before."""
    monkeypatch.setattr(text, "BLOCK_BYTES", 64)
    lines = [f"{n},x" for n in range(300)]
    file = csv_file(tmp_path, [*lines, "1,2,3", *lines[:20], "4,5,6,7", "1" * 1000])
    seen: list[int] = []
    with pytest.raises(DataError, match=r"row 301: has 3 columns instead of 2"):
        seen.extend(block.first_row for block in file.blocks(["b"]))
    assert 280 < seen[-1] <= 300
    long = csv_file(tmp_path, [*lines, "1" * 1000])
    with pytest.raises(DataError, match=r"a line of more than 512 bytes"):
        seen.extend(block.first_row + len(block.rows) - 1 for block in long.blocks(["b"]))
    assert seen[-1] == 300
