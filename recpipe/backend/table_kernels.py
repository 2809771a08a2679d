"""Which groups of tables recpipe's own loops look up and update, where FBGEMM's kernels are slower."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import DataType

from recpipe.backend.chain import Chooser
from recpipe.common.device import using_threads
from recpipe.plugin.tables import Kernel, Table, TableOptimizer, TableSet
from recpipe.tables.groups import ModelTables
from recpipe.tables.resident import ALMOST_NO_RATE, FEW_BYTES, ResidentCollection


def part_of(tables: TableSet) -> str | None:
    """The signature of a group of tables that loops may look up: its features, dimension and optimizer; None:
    there are none for it."""
    own = tables.optimizer
    if own.frozen or not own.fused or tables.weighted or tables.storage is not DataType.FP32:
        return None
    return f"tables {len(tables.features)}x{tables.dim} {own.name}"


def table_parts(tables: ModelTables) -> set[str]:
    """The signatures of all groups."""
    return {part for group in tables.groups if (part := part_of(group.tables)) is not None}


def choose_kernels(tables: ModelTables, chooser: Chooser | None) -> None:
    """Let each group's tables be looked up as ``chooser`` says; None: all by FBGEMM."""
    for own in (group.tables for group in tables.groups):
        part = part_of(own)
        own.kernel.faster, own.kernel.threads = None, torch.get_num_threads()
        if chooser is not None and part is not None:
            own.kernel.faster = partial(_loops_are_faster, chooser, part, len(own.features))


def _loops_are_faster(chooser: Chooser, part: str, features: int, lookups: int) -> bool:
    return chooser.way(part, max(1, lookups // features)) == "loops"


class TableStep:
    """A lookup and the update of tables like those of a signature, with so many ids for each feature."""

    def __init__(self, features: int, dim: int, optimizer: str, lookups: int) -> None:
        own = TableOptimizer(optimizer, ALMOST_NO_RATE)
        rows = max(1, FEW_BYTES // (4 * features * (dim + own.state_width(dim))))
        names = [f"f{number}" for number in range(features)]
        first = partial(_ones, dim)
        tables = TableSet(tuple(Table(n, rows, (n,), first) for n in names), dim, own, seed=0)
        self.kernel: Kernel = tables.kernel
        self.kernel.threads = torch.get_num_threads()
        collection = ResidentCollection(tables, torch.device("cpu"), padded=False)
        (self._tbe,) = collection.tbes
        self._ids = torch.randint(rows, (features * lookups,))
        self._offsets = torch.arange(len(self._ids) + 1)
        self._gradient = torch.randn(lookups, features * dim)

    def __call__(self, by_loops: bool) -> None:
        self.kernel.faster = (lambda lookups: True) if by_loops else None
        found = self._tbe(self._ids, self._offsets)
        with using_threads(1):  # as a step has it
            torch.autograd.backward(found, self._gradient)


def _ones(dim: int, start: int, stop: int) -> NDArray[np.float32]:
    return np.ones((stop - start, dim), np.float32)
