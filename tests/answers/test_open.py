"""Formats of checkpoints that packages bring."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from recpipe.answers.trained import open_trained
from recpipe.plugin.errors import PluginLoadError
from tests.answers.answers import Answers

FORMAT = """
from recpipe.answers.trained import Trained

class Renamed(Trained):
    @classmethod
    def read(cls, directory):
        return Trained.read(directory / "inside")

class Format:
    def holds(self, directory):
        return (directory / "acme.txt").is_file()
    def kind(self):
        return Renamed
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``package(value)`` puts a package on the path whose format of checkpoints is ``value``."""

    def install(value: str) -> None:
        (tmp_path / "acme_format.py").write_text(FORMAT)
        info = tmp_path / "acme_format-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-format\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[recpipe.checkpoints]\nacme = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(importlib.sys.modules, "acme_format", raising=False)  # type: ignore[attr-defined]

    return install


def test_a_packages_format_opens_its_directories_and_no_other(
    package, answers: Answers, tmp_path: Path
) -> None:
    package("acme_format:Format")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "acme.txt").write_text("")
    (tmp_path / "saved" / "inside").symlink_to(answers.folder)
    opened, plain = open_trained(tmp_path / "saved"), open_trained(answers.folder)
    assert type(opened).__name__ == "Renamed"
    assert type(plain).__name__ == "Trained"
    assert opened.step == plain.step


def test_what_is_no_format_is_named(package, tmp_path: Path) -> None:
    package("acme_format:__name__")
    with pytest.raises(PluginLoadError, match=r"acme-format 1.0.*must have holds\(directory\) and kind"):
        open_trained(tmp_path)
