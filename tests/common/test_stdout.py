"""Standard output that is full, or that lacks characters: one line, and the program goes on."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from recpipe.common.console import Stdout


def installed(monkeypatch: pytest.MonkeyPatch, path: str, encoding: str) -> Stdout:
    stream = io.TextIOWrapper(io.BufferedWriter(io.FileIO(path, "w")), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "__stdout__", stream)
    made = Stdout.install()
    assert made is not None
    return made


def test_a_character_that_the_encoding_lacks_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = installed(monkeypatch, str(tmp_path / "out"), "ascii")
    print("caf\xe9 \udcc3", flush=True)
    assert (tmp_path / "out").read_bytes() == b"caf\\xe9 \\udcc3\n"
    assert out.fault is None


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    out = installed(monkeypatch, "/dev/full", "utf-8")
    # The test's own standard output stays.
    monkeypatch.setattr("recpipe.common.console.nobody_reads", lambda: None)
    print("first", flush=True)
    assert out.fault is not None
    assert out.fault.strerror == "No space left on device"
    assert capfd.readouterr().err == "error: cannot write standard output: No space left on device\n"


def test_another_programs_object_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert Stdout.install() is None
