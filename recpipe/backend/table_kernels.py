"""Which groups of tables recpipe's own loops look up and update, where FBGEMM's kernels are slower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.modules.embedding_configs import DataType

from recpipe.backend.chain import Chooser
from recpipe.common.device import using_threads
from recpipe.plugin.tables import Kernel, Table, TableOptimizer, TableSet
from recpipe.tables.fused_update import has_loop
from recpipe.tables.groups import ModelTables
from recpipe.tables.loop_tables import STORAGES
from recpipe.tables.resident import ALMOST_NO_RATE, FEW_BYTES, ResidentCollection

WEIGHTED, HALVES = "weighted", "fp16"
"""In the signatures of tables with weighted ids, and with rows of float16."""
LARGEST = 1 << 30
"""More samples than a batch has: the choice is that of the largest batch measured, which is the run's."""


def table_parts(tables: ModelTables) -> list[tuple[TableSet, str]]:
    """The groups that loops may look up, each with a signature: how many features there are of its dimension
    and optimizer, whatever groups they are in, the dimension and the optimizer, whether ids are weighted, and
    whether rows are float16.

    Updates by loops round otherwise than FBGEMM's. So what is chosen does not depend on how a plugin groups
    the tables, nor on how many ids a group is asked for: a run with it would differ from one without.
    """
    own = [group.tables for group in tables.groups if _may_have_loops(group.tables)]
    features = Counter(kind for each in own for kind in [_kind(each)] * len(each.features))
    return [(each, _signature(features[_kind(each)], each)) for each in own]


def _signature(features: int, tables: TableSet) -> str:
    words = [f"tables {features}x{tables.dim} {tables.optimizer.name}"]
    words += [WEIGHTED] * tables.weighted
    words += [HALVES] * (tables.storage is DataType.FP16)
    return " ".join(words)


def _may_have_loops(tables: TableSet) -> bool:
    own = tables.optimizer
    return not own.frozen and has_loop(own) and tables.storage in STORAGES


def _kind(tables: TableSet) -> tuple[int, str, bool, DataType]:
    return tables.dim, tables.optimizer.name, tables.weighted, tables.storage


def choose_kernels(tables: ModelTables, chooser: Chooser | None) -> None:
    """Let each group's tables be looked up as ``chooser`` says; None: all by FBGEMM."""
    for group in tables.groups:
        group.tables.kernel.faster = None
    for own, part in table_parts(tables):
        if chooser is not None:
            own.kernel.faster = partial(_loops_are_faster, chooser, part)


def _loops_are_faster(chooser: Chooser, part: str) -> bool:
    return chooser.way(part, LARGEST) == "loops"


class TableStep:
    """A lookup and the update of tables like those of a signature, with so many ids for each feature.
    ``more``: what the signature says beside sizes and optimizer."""

    def __init__(
        self, features: int, dim: int, optimizer: str, lookups: int, more: Sequence[str] = ()
    ) -> None:
        own = TableOptimizer(optimizer, ALMOST_NO_RATE)
        storage = DataType.FP16 if HALVES in more else DataType.FP32
        rows = max(1, FEW_BYTES // (4 * features * (dim + own.state_width(dim))))
        names = [f"f{number}" for number in range(features)]
        first = partial(_ones, dim)
        each = tuple(Table(n, rows, (n,), first) for n in names)
        tables = TableSet(each, dim, own, 0, weighted=WEIGHTED in more, storage=storage)
        self.kernel: Kernel = tables.kernel
        collection = ResidentCollection(tables, torch.device("cpu"), padded=False)
        (self._tbe,) = collection.tbes
        self._ids = torch.randint(rows, (features * lookups,))
        self._offsets = torch.arange(len(self._ids) + 1)
        self._weights = torch.rand(len(self._ids)) if tables.weighted else None
        self._gradient = torch.randn(lookups, features * dim)

    def __call__(self, by_loops: bool) -> None:
        self.kernel.faster = (lambda: True) if by_loops else None
        found = self._tbe(self._ids, self._offsets, self._weights)
        with using_threads(1):  # as a step has it
            torch.autograd.backward(found, self._gradient)


def _ones(dim: int, start: int, stop: int) -> NDArray[np.float32]:
    return np.ones((stop - start, dim), np.float32)
