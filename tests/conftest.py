"""Fixtures that every test may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recpipe.data.criteo import SPARSE
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset

ROOT = Path(__file__).resolve().parent.parent
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets: RECPIPE_DATA, else ../shared/data; skips where there is none."""
    folder = Path(os.environ.get("RECPIPE_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set RECPIPE_DATA")
    return folder


@pytest.fixture(scope="session")
def criteo(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Real Criteo rows, with small tables: more collisions, the same skew, a run of a second."""
    file = data_dir / "criteo_80k.tsv.gz"
    if not file.is_file():
        pytest.skip(f"no {file}")
    recipe = {
        "name": "criteo",
        "path": str(file),
        "tables": dict.fromkeys(SPARSE, 1000),
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }
    return open_dataset(recipe, seed=1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What runs learn about data (popularity profiles) goes into a folder of this test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """``cli(*arguments, **environment)``: run ``python -m recpipe`` in an empty folder of its own."""
    source = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
        return subprocess.run(
            [sys.executable, "-m", "recpipe", *arguments],
            cwd=tmp_path,
            env={**env, "PYTHONPATH": source, "COLUMNS": "200", **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
