"""What is carried to a machine with a GPU has the kernels of that GPU's architecture alone."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "packaging" / "one_architecture.py"
NAMES = b"\0.nv_fatbin\0.shstrtab\0__nv_relfatbin\0"


def fat(*entries: tuple[int, bytes]) -> bytes:
    """A fat binary with machine code for these architectures."""
    body = b"".join(
        struct.pack("<HHIQIIII", 2, 0x101, 64, len(code), 0, 64, 0, architecture) + bytes(32) + code
        for architecture, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(fatbin: bytes, name: int = 1) -> bytes:
    """An ELF file with nothing but that section, whose name begins there in ``NAMES``, and its sections'
    names."""
    table = 64 + len(fatbin) + len(NAMES)
    head = struct.pack(
        "<4sBBB9xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2
    )
    sections = [(0, 0, 0), (name, 64, len(fatbin)), (12, 64 + len(fatbin), len(NAMES))]
    rows = [struct.pack("<IIQQQQIIQQ", its, 1, 0, 0, at, size, 0, 0, 1, 0) for its, at, size in sections]
    return head + fatbin + NAMES + b"".join(rows)


def run(
    tmp_path: Path, content: bytes, architecture: int, file: str = "a/kernels.so"
) -> subprocess.CompletedProcess[str]:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr(file, content)
        wheel.writestr("a/code.py", "pass\n")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "a.whl"), str(architecture)]
    return subprocess.run(command, capture_output=True, text=True)


def test_one_architecture_stays_in_every_fat_binary(tmp_path: Path) -> None:
    many = (
        fat((80, b"a" * 16), (90, b"b" * 24), (100, b"c" * 8))
        + bytes(8)
        + fat((90, b"d" * 8), (80, b"e" * 8))
    )
    one = fat((90, b"b" * 24)).ljust(len(fat((80, b"a" * 16), (90, b"b" * 24), (100, b"c" * 8))), b"\0")
    two = fat((90, b"d" * 8)).ljust(len(fat((90, b"d" * 8), (80, b"e" * 8))), b"\0")
    done = run(tmp_path, library(many), 90)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        assert wheel.read("a/kernels.so") == library(one + bytes(8) + two)
        assert wheel.read("a/code.py") == b"pass\n"


def test_kernels_that_others_alone_have_stay(tmp_path: Path) -> None:
    """As NCCL's, which are in another section."""
    theirs = fat((100, b"c" * 8), (120, b"d" * 8))
    many = fat((80, b"a" * 16), (90, b"b" * 24)) + theirs
    one = fat((90, b"b" * 24)).ljust(len(fat((80, b"a" * 16), (90, b"b" * 24))), b"\0")
    section = NAMES.index(b"__nv_relfatbin")
    done = run(tmp_path, library(many, section), 90, "a/libnccl.so.2")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        assert wheel.read("a/libnccl.so.2") == library(one + theirs, section)


def test_an_architecture_that_is_not_there_leaves_the_wheel(tmp_path: Path) -> None:
    done = run(tmp_path, library(fat((80, b"a" * 16))), 90)
    assert done.returncode == 1
    assert "none of architecture 90" in done.stderr
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        assert wheel.read("a/kernels.so") == library(fat((80, b"a" * 16)))
