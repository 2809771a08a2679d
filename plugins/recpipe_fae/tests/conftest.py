"""Fixtures: real rows and generated ones, prepared once; profiles go to a folder of the test's own."""

from pathlib import Path

import pytest
from recpipe_hotline.tests.conftest import synthetic  # noqa: F401


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile that an earlier test has saved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
