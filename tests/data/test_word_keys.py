"""Keys of text that the loop makes are BLAKE2b's, whatever words a thread has seen, and threads parse and
make at once."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recpipe.data import text, text_values, word_keys
from recpipe.data.feature import Feature
from recpipe.data.listing import input_files
from recpipe.data.sources.transforms import string_keys
from recpipe.data.values import read_ids
from recpipe.data.word_keys import WordKeys

WORD = Feature("word", type="text")


def digests(words: list[bytes]) -> list[int]:
    return [int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little") for word in words]


def keys_of(words: list[bytes], made: WordKeys) -> tuple[list[int], bool]:
    offsets = np.cumsum([0, *map(len, words)])
    keys, is_ascii = made(np.frombuffer(b"".join(words), np.uint8), offsets)
    return keys.tolist(), is_ascii


def test_keys_are_blake2b_of_words_of_any_length_seen_before_or_not() -> None:
    draw, made = random.Random(0), WordKeys()
    words = [draw.randbytes(size) for size in range(300)]
    words += [bytes(size) for size in range(60)]  # zeros are none of what stands behind a word
    words += [b"a" * size for size in range(60)] + [b"a" * 47 + bytes([last]) for last in range(256)]
    for _ in range(3):
        draw.shuffle(words)
        assert keys_of(words, made) == (digests(words), False)
    assert keys_of([b"user1", b"", b"x" * 200], made) == (digests([b"user1", b"", b"x" * 200]), True)
    assert keys_of(["Zürich".encode()], made)[1] is False
    assert keys_of([b"x" * 130 + b"\xff"], made)[1] is False


def test_more_words_than_a_thread_knows_push_each_other_out() -> None:
    made, words = WordKeys(), [b"w%d" % n for n in range(2 * word_keys.SLOTS)]
    for _ in range(2):
        assert keys_of(words, made)[0] == digests(words)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_ids_of_text_are_the_same_with_and_without_the_loop(
    kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys_of([b"a"], WordKeys())  # from now on loops are at hand
    words = [b"a", None, b"", "Zürich".encode(), b"NA", b"a", b"x" * 100, b"\xff\xfe", b"user"]
    for own in (words, words[:-2], words[:3], [b"a", b"bc"]):
        array = pa.array(own * 3, pa.large_binary()).cast(pa.binary()).view(pa.binary())
        array = array.cast(pa.large_binary() if "large" in str(kind) else pa.binary()).view(kind)[1:]
        slow = read_ids(array, WORD)
        with monkeypatch.context() as patch:
            patch.setattr(text_values, "LONG", 1)
            patch.setattr(text_values, "string_keys", _never if b"\xff\xfe" not in own else string_keys)
            quick = read_ids(array, WORD)
        for one, other in ((slow.keys, quick.keys), (slow.missing, quick.missing), (slow.valid, quick.valid)):
            assert one.tolist() == other.tolist()
        assert slow.valid.all() == (b"\xff\xfe" not in own or "binary" in str(kind))


def _never(_: pa.Array) -> None:
    raise AssertionError("the loop reads UTF-8")


def test_blocks_of_csv_become_something_in_the_threads_that_parse_them_and_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 100)
    folder = tmp_path / "dt=2026-03-01"
    folder.mkdir()
    (folder / "a.csv").write_text("n,word\n" + "".join(f"{n},w{n}\n" for n in range(200)))
    (file,) = input_files(str(tmp_path))
    threads = set()

    def total(rows: pa.RecordBatch) -> tuple[int, list[str]]:
        threads.add(threading.current_thread().name)
        assert set(rows["dt"].to_pylist()) == {"2026-03-01"}
        return sum(map(int, rows["n"].to_pylist())), rows.schema.names

    found = list(file.each(["dt", "n"], total))
    assert len(found) > 5
    first, row = 0, 1
    for block, (added, names) in found:
        size = len(block.rows)
        assert (block.first_row, added, names) == (row, sum(range(first, first + size)), ["dt", "n"])
        first, row = first + size, row + size
    assert first == 200
    assert any(name.startswith("recpipe-parse") for name in threads)

    def fault(rows: pa.RecordBatch) -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        list(file.each(["n"], fault))
