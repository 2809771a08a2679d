"""Copies to and from a GPU: the same rows arrive, and nothing is read before it has arrived."""

from __future__ import annotations

import weakref
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from recpipe.common.loops import ALONE, Spread
from recpipe.tables.tiers import transfer
from recpipe.tables.tiers.gpu_lookups import Finder
from recpipe.tables.tiers.transfer import Sent, Transfer
from tests.pretend_gpu.late import GPU, FakeGpu, gpu
from tests.tables.samples import MAKERS, Collection, dump, identical, stream, table_set, tiers, train_ahead

__all__ = ["gpu"]
ARRAYS = (
    np.arange(7, dtype=np.int64),
    np.empty(0, np.int64),
    np.linspace(0, 1, 3, dtype=np.float32),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    np.array([5], np.int64),
)


POSITIONS = (np.arange(7, dtype=np.int64), np.empty(0, np.int64), np.array([-4, 9], np.int32))


@pytest.mark.parametrize("threads", [1, 3])
def test_arrays_of_any_type_in_one_copy(gpu: FakeGpu, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "LEAST_COPIED", 2)
    with closing(Spread(threads)) as several:
        sent = Transfer(GPU).arrays_now(ARRAYS, several)
    assert gpu.copies == 1
    for found, array in zip(sent, ARRAYS, strict=True):
        assert found.numpy().dtype == array.dtype
        np.testing.assert_array_equal(found.numpy(), array)
    assert Transfer(GPU).arrays_now([], ALONE) == []


def test_positions_in_one_copy(gpu: FakeGpu) -> None:
    sent = Transfer(GPU).send(*POSITIONS)
    assert gpu.copies == 1
    assert not np.array_equal(sent.tensors[0].numpy(), POSITIONS[0]), "the control: not waited for"
    for _ in range(2):
        for found, array in zip(sent.use(), POSITIONS, strict=True):
            assert found.dtype == torch.int64
            np.testing.assert_array_equal(found.numpy(), array)
    assert [stream for _, stream in gpu.lent] == [gpu.default], "its memory, once"


def test_on_a_cpu_nothing_is_copied() -> None:
    own, short = np.arange(3), np.arange(3, dtype=np.int32)
    here = Transfer(torch.device("cpu"))
    (found,), (same, other) = here.arrays_now([own], ALONE), here.send(own, short).use()
    own[0] = 9
    assert (found[0], same[0], other.dtype) == (9, 9, torch.int64)


def test_records_go_to_the_host_as_they_were(gpu: FakeGpu) -> None:
    moves = Transfer(GPU)
    records = torch.arange(6.0).view(3, 2)
    landed = moves.to_host(records)
    assert gpu.copies == 0, "begun by the thread that waits for it"
    np.testing.assert_array_equal(landed(), records.numpy())
    assert not gpu.lent, "the records are kept until the copy is done"


def test_what_was_used_is_kept_until_the_copy_is_done(gpu: FakeGpu) -> None:
    moves, used = Transfer(GPU), torch.zeros(3)
    seen = weakref.ref(used)
    landed = moves.to_host(torch.arange(6.0).view(3, 2), [used])
    del used
    assert seen() is not None
    landed()
    assert seen() is None
    assert not gpu.lent
    left = torch.zeros(2)
    moves.let_go([left])
    assert gpu.lent == [(left.untyped_storage().data_ptr(), gpu.default)]


def on_fake_gpu(collection: Collection) -> Collection:
    """The collection, which moves its rows as it would with a GPU; the rows themselves stay here."""
    collection.cold.transfer = Transfer(GPU)
    collection._finder = Finder(collection.tables, collection.cold.transfer, ALONE)
    collection.finds_ahead = True
    return collection


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("policy", MAKERS)
def test_tiers_wait_for_every_copy(gpu: FakeGpu, tmp_path: Path, policy: str, prefetch: bool) -> None:
    batches, found = stream(12, multi=True), []
    for number, place in enumerate((lambda made: made, on_fake_gpu)):
        made = place(tiers(table_set(), policy, tmp_path / str(number), "host", prefetch))
        train_ahead(made, batches, 5)
        found.append(dump(made))
        made.close()
    assert gpu.copies > 2 * len(batches)
    assert identical(*found)


@pytest.mark.parametrize("forgotten", ["records", "positions"])
def test_a_forgotten_wait_shows(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    use = Sent.use

    def forgetful(sent: Sent, kept: bool = False) -> list[torch.Tensor]:
        kind = "records" if sent.tensors[0].dim() == 2 else "positions"
        return sent.tensors if kind == forgotten else use(sent, kept)

    monkeypatch.setattr(Sent, "use", forgetful)
    expected = tiers(table_set(), "lru", tmp_path / "cpu")
    wrong = on_fake_gpu(tiers(table_set(), "lru", tmp_path / "gpu"))
    train_ahead(expected, stream(6, multi=False), 0)
    try:
        train_ahead(wrong, stream(6, multi=False), 0)
        assert not identical(dump(wrong), dump(expected))
    except (RuntimeError, IndexError):
        pass  # an index of rubbish
