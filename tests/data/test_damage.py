"""Damaged files of every format: read or refused in one line, never a traceback. And the same rows of
Criteo's text are good whatever stands beside them and however the file is cut into blocks."""

from __future__ import annotations

import gzip
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data.config import CriteoConfig, DataConfig, NpyConfig, ParquetConfig
from recpipe.data.make import open_dataset
from recpipe.data.sources import criteo as criteo_module
from recpipe.data.sources import criteo_text
from recpipe.errors import UserError

from .conftest import TABLES, make_row

# -- one rule for a row of text --------------------------------------------------------------

ODD_FIELDS = [
    *(" 12", "12 ", " ", "+12", "1e+5", "1e5", "1E-400", "-.5", "5.", "-", ".", "nan", "inf", "1e999"),
    *("0x10", "1_000", "12\r", "\r", "\ufeff12", "\ufeff", '"12"', "1,5", "1e", "1f", "-0", "9" * 400),
    *("\x00", "\x0b12", "\xa012", "é", "0", "1", "ab", "AB", "g", "1" * 16, "1" * 17, "", "١"),
]


def odd_rows(rng: random.Random, count: int) -> list[bytes]:
    """Rows of which a third has a field, a prefix or an end that some reader could take for good."""
    rows = []
    for _ in range(count):
        fields = make_row(rng).split("\t")
        draw = rng.random()
        if draw < 0.3:
            fields[rng.choice([0, *range(1, 14), 14, 39])] = rng.choice(ODD_FIELDS)
        row = "\t".join(fields).encode()
        if draw > 0.95:
            row = rng.choice([b"\xef\xbb\xbf", b" ", b"\t", b"\n"]) + row
        rows.append(row + rng.choice([b"", b"", b"", b"\r"]))
    return rows


def accepted(row: bytes) -> bool:
    """Whether a file of this one row is read."""
    try:
        criteo_text.parse_plain(row + b"\n")
    except criteo_text.Malformed:
        return not criteo_text.bad_lines(row + b"\n")[0]
    return True


def test_a_row_is_good_whatever_stands_beside_it(criteo, tmp_path, monkeypatch):
    """Each row alone, all in one block, in blocks of a few rows: the same rows, and the same values."""
    rng = random.Random(11)
    rows = [line for row in odd_rows(rng, 300) for line in row.split(b"\n")]
    good = [row for row in rows if accepted(row)]
    assert 150 < len(good) < len(rows) - 50
    file, clean = tmp_path / "odd.tsv", tmp_path / "clean.tsv"
    file.write_bytes(b"\n".join(rows))
    clean.write_bytes(b"".join(row.removesuffix(b"\r") + b"\n" for row in good))
    wanted = open_dataset(criteo(str(clean)), 0)
    for number, block in enumerate((1000, 4096, 8 << 20)):
        monkeypatch.setattr(criteo_module, "BLOCK_BYTES", block)
        cache = str(tmp_path / f"cache-{number}")
        found = open_dataset(criteo(str(file), on_bad_row="skip", cache_dir=cache), 0)
        assert found.rejected_rows == len(rows) - len(good)
        assert found.size("train") + found.size("eval") == len(good)
        for mine, theirs in zip(found.batches("train", 999), wanted.batches("train", 999), strict=True):
            assert (mine.dense == theirs.dense).all()
            assert (mine.sparse.values() == theirs.sparse.values()).all()
            assert (mine.labels == theirs.labels).all()


def test_an_id_has_hexadecimal_digits_alone():
    """Whatever other byte stands in it, and where."""
    for place in range(8):
        for byte in {*range(256)} - {*b"\t\n\r"}:
            id_ = bytearray(b"01239afA")
            id_[place] = byte
            text = b"\t".join([b"1", *[b"2"] * 13, *[bytes(id_)] * 26]) + b"\n"
            is_good = byte in b"0123456789abcdefABCDEF"
            assert bool(criteo_text.bad_lines(text)[0]) != is_good
            if is_good:
                assert (criteo_text.parse_plain(text).ids == int(id_, 16)).all()
            else:
                with pytest.raises(criteo_text.Malformed):
                    criteo_text.parse_plain(text)


def test_the_quick_parser_takes_no_row_that_the_slow_one_refuses():
    """Both on each of many rows; and what the slow one takes, the quick one reads."""
    rng, refused = random.Random(12), 0
    for row in odd_rows(rng, 400):
        text = row + b"\n"
        bad, good = criteo_text.bad_lines(text)
        try:
            criteo_text.parse_plain(text)
            assert not bad, row
        except criteo_text.Malformed:
            refused += 1
        assert len(criteo_text.parse_block(good)) == good.count(b"\n")
    assert refused > 50


@pytest.mark.parametrize("field", [" 12", "12 ", "+12", "\ufeff12", "12\r"])
@pytest.mark.parametrize("beside", ["good", "bad"])
def test_a_field_is_nothing_but_its_value(rows, criteo, tmp_path, field, beside):
    """Refused in a file of good rows and beside a bad one, the first of both named."""
    fields = rows[5].split("\t")
    fields[3] = field
    lines = [*rows[:5], "\t".join(fields), *rows[6:9], "x" if beside == "bad" else rows[9]]
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n", newline="")
    with pytest.raises(UserError, match=r"row 6: column I3: '.*12.*' is not a finite number"):
        open_dataset(criteo(str(tmp_path / "a.tsv")), 0)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_of_one_row(rows, criteo, tmp_path, end):
    (tmp_path / "a.tsv").write_text(rows[0] + end, newline="")
    assert open_dataset(criteo(str(tmp_path / "a.tsv")), 0).size("train") == 1


def test_a_line_is_too_long_wherever_blocks_end(criteo, tmp_path, monkeypatch):
    monkeypatch.setattr(criteo_module, "BLOCK_BYTES", 1000)
    row = make_row(random.Random(1)).encode()
    fields = row.split(b"\t")
    fields[1] = b"0." + b"0" * (1000 - 2 - len(row) + len(fields[1]))
    longest = b"\t".join(fields)
    assert len(longest) == 1000
    for before in range(0, 6):
        text = (row + b"\n") * before + longest + b"\n"
        (tmp_path / "a.tsv").write_bytes(text)
        cache = str(tmp_path / f"cache-{before}")
        assert open_dataset(criteo(str(tmp_path / "a.tsv"), cache_dir=cache), 0).samples == before + 1
        (tmp_path / "a.tsv").write_bytes(text.replace(b"\t0.", b"\t0.0"))
        with pytest.raises(UserError, match="a line of more than 1,000 bytes"):
            open_dataset(criteo(str(tmp_path / "a.tsv")), 0)


# -- fuzzing ---------------------------------------------------------------------------------


def text_files(folder: Path) -> CriteoConfig:
    rng = random.Random(2)
    (folder / "a.tsv").write_text("".join(make_row(rng) + "\n" for _ in range(4)))
    return CriteoConfig(path=str(folder / "a.tsv"), tables=dict(TABLES))


def gz_files(folder: Path) -> CriteoConfig:
    config = text_files(folder)
    (folder / "a.gz").write_bytes(gzip.compress((folder / "a.tsv").read_bytes(), mtime=0))
    (folder / "a.tsv").unlink()
    config.path = str(folder / "a.gz")
    return config


def zst_files(folder: Path) -> CriteoConfig:
    config = text_files(folder)
    with pa.CompressedOutputStream(str(folder / "a.zst"), "zstd") as stream:
        stream.write((folder / "a.tsv").read_bytes())
    (folder / "a.tsv").unlink()
    config.path = str(folder / "a.zst")
    return config


def npy_files(folder: Path) -> NpyConfig:
    for part, width, kind in (("dense", 13, np.float32), ("sparse", 26, np.int32), ("labels", 1, np.int32)):
        np.save(folder / f"a_{part}.npy", np.ones((4, width), kind))
    return NpyConfig(path=str(folder), tables=dict(TABLES))


def parquet_files(folder: Path) -> ParquetConfig:
    columns = {"y": [0, 1, None, 1], "x": [0.5, None, 1e300, 2.0], "id": [1, 2, 3, None]}
    columns |= {"word": ["a", "b", None, "é"], "ids": [[1, 2], [], None, [3]]}
    columns |= {"words": [["a"], None, ["b", "c"], []]}
    pq.write_table(pa.table(columns), folder / "a.parquet", compression="none")
    sparse = ["id", "word", "ids", "words"]
    config = ParquetConfig(path=str(folder), label="y", dense=["x"], sparse=sparse, table_rows=9)
    config.eval_fraction = 0.0
    return config


FILES: dict[str, Callable[[Path], DataConfig]] = {
    "text": text_files,
    "gz": gz_files,
    "zst": zst_files,
    "npy": npy_files,
    "parquet": parquet_files,
}


def mutated(rng: random.Random, whole: bytes) -> bytes:
    """A few bytes changed, put in or taken out, most of them in the first or last 200; or an end cut off."""
    data = bytearray(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place = rng.randrange(len(data) or 1)
        if rng.random() < 0.6:
            place = rng.choice([rng.randrange(200), len(data) - rng.randrange(1, 200)]) % max(1, len(data))
        kind = rng.random()
        byte = rng.choice([rng.randrange(256), *b"\x00\xff\n\r\t 09'({"])
        if kind < 0.7 and data:
            data[place] = byte
        elif kind < 0.8:
            data.insert(place, byte)
        elif kind < 0.9:
            del data[place : place + rng.choice([1, 2, 50])]
        else:
            del data[place:]
    return bytes(data)


def read_all(config: DataConfig) -> tuple[int, str]:
    """Every batch of both splits: how many samples, and with which message the data is refused."""
    try:
        dataset = open_dataset(config, 0)
        return sum(batch.size for split in ("train", "eval") for batch in dataset.batches(split, 3)), ""
    except UserError as error:
        return 0, str(error)


def fuzz(kind: str, tmp_path: Path, seed: int, tries: int) -> tuple[int, int]:
    """Damage a file at a time; how often it was read and how often refused in one line."""
    rng = random.Random(seed)
    folder = tmp_path / "files"
    folder.mkdir()
    config = FILES[kind](folder)
    read = refused = 0
    for number in range(tries):
        config.on_bad_row = rng.choice(["error", "skip"])
        config.cache_dir = str(tmp_path / "cache" / str(number))
        file = rng.choice(sorted(folder.iterdir()))
        whole = file.read_bytes()
        damaged = mutated(rng, whole)
        file.write_bytes(damaged)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                samples, message = read_all(config)
        except Exception as fault:
            raise AssertionError(f"{file.name}, try {number} of seed {seed}: {damaged!r}") from fault
        if message:
            assert message.isprintable()
            assert str(folder) in message
            assert len(message) < 700, message
        read, refused = read + (samples > 0), refused + bool(message)
        file.write_bytes(whole)
    return read, refused


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_read_or_refused(tmp_path, kind):
    read, refused = fuzz(kind, tmp_path, seed=1, tries=80)
    assert read > 3 or kind == "gz", "gzip's checksum covers every byte"
    assert refused > 10


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize("kind", FILES)
def test_many_damaged_files(tmp_path, kind, seed):
    fuzz(kind, tmp_path, seed, tries=2000)


def damage_cache(tmp_path: Path, seed: int, tries: int) -> int:
    """Damage the head of a prepared file at a time; how often the data was prepared again."""
    rng = random.Random(seed)
    folder = tmp_path / "files"
    folder.mkdir()
    config = parquet_files(folder)
    config.on_bad_row, config.cache_dir = "skip", str(tmp_path / "cache")
    samples, _ = read_all(config)
    (target,) = (tmp_path / "cache").glob("data-*/")
    again = 0
    for _ in range(tries):
        file = rng.choice(sorted(target.iterdir()))
        whole = file.read_bytes()
        head = len(whole) if file.suffix == ".json" else 128
        file.write_bytes(mutated(rng, whole[:head]) + whole[head:])
        changed = file.stat().st_ino
        assert read_all(config) == (samples, "")
        again += file.stat().st_ino != changed
        file.write_bytes(whole)
    return again


def test_a_damaged_cache_header_is_prepared_again(tmp_path):
    assert damage_cache(tmp_path, seed=3, tries=60) > 20


@pytest.mark.soak
def test_many_damaged_cache_headers(tmp_path):
    damage_cache(tmp_path, seed=4, tries=5000)
