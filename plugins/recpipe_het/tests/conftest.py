"""Fixtures: real rows."""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path

import pytest

from recpipe.data.sources.criteo_columns import SPARSE

ROWS = 5000


@pytest.fixture(scope="session")
def criteo(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides for a run on some thousand real Criteo rows, with small tables: the same skew."""
    file = data_dir / "criteo_80k.tsv.gz"
    if not file.is_file():
        pytest.skip(f"no {file}")
    folder = tmp_path_factory.mktemp("criteo")
    with gzip.open(file, "rb") as whole:
        (folder / "rows.tsv").write_bytes(b"".join(islice(whole, ROWS)))
    tables = ",".join(f"{name}:500" for name in SPARSE)
    return (
        "data=criteo",
        f"data.path={folder / 'rows.tsv'}",
        f"data.tables={{{tables}}}",
        f"data.cache_dir={folder / 'cache'}",
        "data.batch_size=128",
        "model.embedding_dim=8",
        "trainer.progress=false",
    )
