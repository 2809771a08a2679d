"""Checkpoints as recpipe wrote them before its tables had one layout."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import numpy as np

from recpipe.checkpoint.manifest import read_manifest
from recpipe.common.tensors import TensorFiles
from tests.mutations import reseal


def as_npy(checkpoint: Path) -> Path:
    """Put ``<table>.weight.npy`` and ``<table>.state.npy`` in the place of what a run of now has saved."""
    tables = checkpoint / "tables"
    files = TensorFiles.sharded(tables)
    for name in list(files.pieces):
        if not name.endswith(".weight"):
            continue
        table = name.removesuffix(".weight")
        rows, state = files.shape(name)[0], f"{table}.state"
        values = files.rows(state, 0, rows) if state in files.pieces else np.zeros((rows, 0), np.float32)
        np.save(tables / f"{quote(table, safe='')}.weight.npy", files.rows(name, 0, rows))
        np.save(tables / f"{quote(table, safe='')}.state.npy", values)
    for file in tables.glob("*.safetensors"):
        file.unlink()
    reseal(checkpoint, read_manifest(checkpoint).step)
    return checkpoint
