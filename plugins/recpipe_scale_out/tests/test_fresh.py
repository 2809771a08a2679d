"""Shards that follow deltas: what they answer for each version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recpipe.answers.delta import Change, Delta, Version, write_delta
from recpipe.answers.score import row_bytes
from recpipe.errors import UserError

pytest.importorskip("grpc", reason="recpipe[grpc] is not installed")
pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")

from recpipe_scale_out.fresh import KEPT, FreshRows, ShardFollower
from recpipe_scale_out.rows import Rows
from recpipe_scale_out.serving import ShardModel, ShardModels
from recpipe_scale_out.tests.answering import ROWS, cut, halves, made_up, whole_tables
from recpipe_scale_out.versions import sequence_of
from recpipe_scale_out.wire import Question, Wanted

DELTAS = 5


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("package")
    return folder, made_up(folder)


@pytest.fixture(scope="module")
def deltas(package: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Delta]:
    """Each replaces some rows of the tables t and v."""
    manifest, version, made = package[1], Version.of_package(*package), []
    folder, draw = tmp_path_factory.mktemp("deltas"), np.random.default_rng(0)
    for _ in range(DELTAS):
        rows = {}
        for name in ("t", "v"):
            about = manifest["tables"][name]
            ids = np.sort(draw.choice(ROWS[name], 9, replace=False))
            values = torch.from_numpy(draw.normal(size=(9, about["dimension"])).astype(np.float32))
            values = values.half() if about["type"] == "fp16" else values
            rows[name] = ids, about["type"], values.view(torch.uint8)
            assert rows[name][2].shape[1] == row_bytes(about)
        made.append(write_delta(folder, version, Change(version.step + 1, 0.0, 0.0, rows, {}, {})))
        version = made[-1].version
    return made


def every_row(rows: Rows, table: str) -> np.ndarray[Any, Any]:
    """All rows that a shard has of ``table``, as it answers."""
    number = min(n for n, own in rows.lookups.items() if own.table == table and not own.weighted)
    return rows.pooled(Question.of([Wanted(number, rows.held[table], np.arange(rows.held[table]), None)]))


@pytest.mark.parametrize("parts", [whole_tables(2), halves(5)], ids=["whole", "halves"])
def test_each_version_that_is_kept_has_its_own_rows(
    parts, package, deltas: list[Delta], tmp_path: Path
) -> None:
    _, folder, *_ = cut(*package, parts, len({own[0][0] for own in parts.values()}), tmp_path / "cut")
    first = FreshRows(folder)
    models = ShardModels(ShardModel(first), KEPT)
    follower = ShardFollower(
        first, deltas[0].directory.parent, None, models.drop, lambda rows: models.take(ShardModel(rows))
    )
    about = first.content["tables"]["t"]
    wanted = [every_row(first, "t").reshape(-1, 8).copy()]
    for delta in deltas:
        ids, rows = delta.rows_of({"tables": {"t": {**about, "rows": about["of"]}}}, "t")
        here = ((ids >= about["first"]) & (ids < about["first"] + about["rows"])).numpy()
        wanted.append(wanted[-1].copy())
        wanted[-1][ids.numpy()[here] - about["first"]] = rows.view(torch.float32).numpy()[here]
        assert asyncio.run(follower.look())
        for own in models.every():
            found = every_row(own.rows, "t").reshape(-1, 8)
            np.testing.assert_array_equal(found, wanted[sequence_of(own.version)])
        assert not np.array_equal(wanted[-1], wanted[-2])
    assert [sequence_of(own.version) for own in models.every()] == [3, 4, 5]
    assert not asyncio.run(follower.look()), "there is no other delta"
    np.testing.assert_array_equal(every_row(Rows(folder), "t").reshape(-1, 8), wanted[0])


def test_a_delta_of_another_chain_and_pruned_rows_are_refused(
    package, deltas: list[Delta], tmp_path: Path
) -> None:
    _, *folders = cut(*package, whole_tables(2), 2, tmp_path / "cut")
    with pytest.raises(UserError, match="rows of table 'p' are left out"):
        FreshRows(folders[1])
    first = FreshRows(folders[0])
    with pytest.raises(UserError, match="is delta 2, and 1 is missing before it"):
        first.read(deltas[1].directory, None)
    version = Version("0" * 64, 0, "0" * 64, 7)
    (tmp_path / "other").mkdir()
    other = write_delta(tmp_path / "other", version, Change(8, 0.0, 0.0, {}, {}, {}))
    with pytest.raises(UserError, match="is of another package"):
        first.read(other.directory, None)
