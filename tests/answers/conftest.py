"""A run that the tests of answers share, and a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.answers.answers import Answers, trained


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared data, and measured kernels, of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="package")
def answers(tmp_path_factory: pytest.TempPathFactory, own_cache: Path) -> Answers:
    return trained(tmp_path_factory.mktemp("answers"))
