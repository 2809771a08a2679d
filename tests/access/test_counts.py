"""The popularity profile: counted from a sample, kept, reused, and refused when it is not sound."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recpipe.access.counts import load_profile, table_bases
from recpipe.data.config import SyntheticConfig
from recpipe.data.make import open_dataset
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import Batch
from recpipe.plugin.context import Context, TableInfo
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from tests.placing import context_of, inputs_of


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    dataset = open_dataset(SyntheticConfig(samples=2000, table_scale=0.01), seed=1)
    tables = TableSet.one_each(dataset.schema.sparse, 8, TableOptimizer("rowwise_adagrad", 0.1), 1)
    return context_of(
        tables,
        27,
        dataset,
        batch_size=64,
        epoch_samples=dataset.size("train"),
        cache_dir=tmp_path,
        batches=lambda first: dataset.batches("train", 64, first),
    )


def test_a_full_sample_counts_every_lookup(ctx: Context) -> None:
    bases = table_bases(ctx)
    truth = np.zeros(int(bases[-1]), np.int32)
    for batch in ctx.batches(0):
        for table, name in enumerate(ctx.tables):
            np.add.at(truth, bases[table] + batch.sparse[name].values().numpy(), 1)
    assert np.array_equal(load_profile(ctx, 1.0).dense(len(truth)), truth)


def test_it_is_reused_and_keyed_by_what_it_depends_on(ctx: Context) -> None:
    first, second = load_profile(ctx, 0.2), load_profile(ctx, 0.2)
    assert (first.reused, second.reused) == (False, True)
    assert np.array_equal(first.rows, second.rows)
    assert np.array_equal(first.counts, second.counts)
    for other in (replace(ctx, seed=2), replace(ctx, data_fingerprint="x")):
        assert not load_profile(other, 0.2).reused
    assert not load_profile(ctx, 0.3).reused


def test_a_small_sample_reads_few_batches(ctx: Context) -> None:
    read: list[int] = []

    def counted(first: int) -> Iterator[Batch]:
        for batch in ctx.batches(first):
            read.append(batch.size)
            yield batch

    load_profile(replace(ctx, batches=counted), 0.1)
    assert len(read) == -(-ctx.epoch_samples // 640)


def archive(header: bytes) -> bytes:
    """An archive whose arrays have ``header``."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name in ("meta", "rows", "counts"):
            file.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    return out.getvalue()


HUGE = b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999,), }"


@pytest.mark.parametrize("content", [b"", b"not a zip", None, archive(HUGE), archive(b"(" * 5000)])
def test_a_damaged_file_is_named_with_the_remedy(ctx: Context, tmp_path: Path, content: bytes | None) -> None:
    load_profile(ctx, 0.2)
    (file,) = (tmp_path / "profiles").iterdir()
    file.write_bytes(file.read_bytes()[:-40] if content is None else content)
    with pytest.raises(UserError, match=rf"{file.name} is damaged; delete it"):
        load_profile(ctx, 0.2)


def test_a_foreign_file_is_refused(ctx: Context, tmp_path: Path) -> None:
    load_profile(ctx, 0.2)
    (mine,) = (tmp_path / "profiles").iterdir()
    other = replace(ctx, seed=2)
    load_profile(other, 0.2)
    (theirs,) = set((tmp_path / "profiles").iterdir()) - {mine}
    mine.replace(theirs)
    with pytest.raises(UserError, match="of other data or tables; delete it"):
        load_profile(other, 0.2)


def test_a_folder_that_cannot_be_used_is_named_with_a_remedy(ctx: Context, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match="taken.*XDG_CACHE_HOME"):
        load_profile(replace(ctx, cache_dir=tmp_path / "taken"), 0.2)


def test_a_full_disk_leaves_no_half_file(
    ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match="cannot write.*No space left.*free space"):
        load_profile(ctx, 0.2)
    assert list((tmp_path / "profiles").iterdir()) == []


def test_an_id_beyond_its_table_is_named(ctx: Context) -> None:
    infos = list(ctx.tables.values())
    infos[0] = TableInfo(infos[0].name, 1, 8)
    tables = {info.name: info for info in infos}
    small = TableSet.one_each(
        [SparseFeature(t.name, t.rows) for t in infos], 8, TableOptimizer("sgd", 0.1), 1
    )
    with pytest.raises(DataError, match=rf"feature {infos[0].name} is not in its table of 1 rows"):
        load_profile(replace(ctx, tables=tables, lookups=inputs_of(small).lookups), 1.0)


def test_nothing_is_saved_where_there_is_no_folder(ctx: Context, tmp_path: Path) -> None:
    assert not load_profile(replace(ctx, cache_dir=None), 0.2).reused
    assert list(tmp_path.iterdir()) == []
