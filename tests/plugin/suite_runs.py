"""The suite over plugins that a test installs, run by pytest inside a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

CHEATS = Path(__file__).parent / "cheats"


@dataclass
class Outcome:
    """What became of the suite's tests, by their names."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """With what was said."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, or its fixtures."""
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.failed[name] = report.longrepr.reprcrash.message  # type: ignore[union-attr]
        elif report.when == "call" and report.passed:
            self.passed.add(name)


def run_suite(folder: Path, plugin: str, *options: str, **attributes: object) -> Outcome:
    """``PluginSuite`` with these class attributes over the installed ``plugin``."""
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    lines = [f"    {name} = {value!r}" for name, value in {"plugin": plugin, **attributes}.items()]
    test = folder / f"test_{folder.name}_{abs(hash(folder))}.py"
    code = ["from recpipe.testing import PluginSuite", "class TestIt(PluginSuite):", *lines]
    test.write_text("\n".join(code), encoding="utf-8")
    outcome = Outcome()
    # The outer run collects garbage, and asks for what could not be raised.
    off = [
        word for name in ("cacheprovider", "xdist", "unraisableexception") for word in ("-p", f"no:{name}")
    ]
    arguments = ["-q", *off, "--import-mode=importlib", "-W", "ignore"]
    places = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), f"--basetemp={folder / 'tmp'}"]
    pytest.main([*arguments, *places, *options, str(test)], plugins=[outcome])
    return outcome
