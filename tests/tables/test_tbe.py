"""What FBGEMM's TBEs are asked for, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation

from recpipe.tables import collection
from recpipe.tables.build import slab_rows
from recpipe.tables.collection import fused_tbe
from recpipe.tables.sharding.plan import fused
from tests.tables.samples import CPU, FEATURES, table_set

GPU = torch.device("cuda", 0)


def asked(monkeypatch: pytest.MonkeyPatch, device: torch.device, **optimizer: Any) -> dict[str, Any]:
    """The arguments of a TBE."""
    told: dict[str, Any] = {}

    def made(embedding_specs: list[tuple[Any, ...]], **named: Any) -> Mock:
        told.update(named, location=embedding_specs[0][2])
        return Mock()

    monkeypatch.setattr(collection, "SplitTableBatchedEmbeddingBagsCodegen", made)
    monkeypatch.setattr(collection, "LoopTables", lambda tables, features_of, **named: made(**named))
    tables = table_set()
    tables = replace(tables, optimizer=replace(tables.optimizer, **optimizer))
    fused_tbe(tables, [10], [0], device, pooled=True)
    return told


def test_a_wrong_index_ends_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the loaders' check is enough."""
    on_gpu, on_cpu = asked(monkeypatch, GPU), asked(monkeypatch, CPU)
    assert (on_gpu["bounds_check_mode"], on_gpu["location"]) == (
        BoundsCheckMode.FATAL, EmbeddingLocation.DEVICE
    )  # fmt: skip
    assert (on_cpu["bounds_check_mode"], on_cpu["location"]) == (BoundsCheckMode.NONE, EmbeddingLocation.HOST)


def test_tests_check_every_index() -> None:
    """The environment of ``conftest.py`` holds in all processes of the tests."""
    tbe = fused_tbe(table_set(), [10], [0], CPU, pooled=True)
    with pytest.raises(RuntimeError, match="idx < num_rows"):
        tbe(torch.tensor([10]), torch.tensor([0, 1]))


@pytest.mark.parametrize("wanted", [True, False])
def test_rounding_is_the_recipes(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """FBGEMM's own default is stochastic."""
    assert asked(monkeypatch, GPU, stochastic_rounding=wanted)["stochastic_rounding"] is wanted
    optimizer = replace(table_set().optimizer, stochastic_rounding=wanted)
    assert fused(optimizer)["stochastic_rounding"] is wanted


def test_room_for_a_batch_in_the_slab() -> None:
    class Place:
        device, batch_size = GPU, 32

    tables = table_set()
    assert slab_rows(tables, Place()) == len(FEATURES) * 32 // 4  # type: ignore[arg-type]
    Place.batch_size = 10**6
    assert slab_rows(tables, Place()) == tables.layout.total_rows  # type: ignore[arg-type]
    Place.device = CPU
    assert slab_rows(tables, Place()) == 1  # type: ignore[arg-type]
