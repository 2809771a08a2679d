"""A sample's hash follows its content, whatever batch it comes in and wherever it stands there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.data.content import sample_hashes
from recpipe.data.select import select
from tests.pipeline.samples import random_batch


@dataclass
class Odd:
    """Of a user's own: half precision, flags, weighted ids, and one tensor that samples share."""

    image: torch.Tensor
    flags: torch.Tensor
    clicks: JaggedTensor
    ids: KeyedJaggedTensor
    shared: torch.Tensor


def odd(size: int) -> Odd:
    rng = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 4, (2 * size,), generator=rng)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=rng)
    weights = torch.rand(len(ids), generator=rng)
    clicks = torch.full((size,), 2)
    return Odd(
        torch.randn(size, 2, 3, generator=rng).to(torch.bfloat16),
        torch.rand(size, generator=rng) < 0.5,
        JaggedTensor(torch.arange(2 * size), lengths=clicks),
        KeyedJaggedTensor(["a", "b"], ids, weights=weights, lengths=lengths),
        torch.zeros(3),
    )


@pytest.mark.parametrize("multi", [False, True])
def test_hashes_move_with_their_samples(multi: bool) -> None:
    batch = random_batch(np.random.default_rng(1), 40, multi)
    hashes, order = sample_hashes(batch), np.random.default_rng(2).permutation(40)
    assert len(np.unique(hashes)) == 40
    np.testing.assert_array_equal(sample_hashes(select(batch, order)), hashes[order])


def test_so_do_those_of_batches_of_any_type() -> None:
    batch, order = odd(30), np.arange(30)[::-1].copy()
    hashes = sample_hashes(batch)
    assert len(np.unique(hashes)) == 30
    np.testing.assert_array_equal(sample_hashes(select(batch, order)), hashes[order])


def test_any_change_shows_in_its_sample_alone() -> None:
    batch = random_batch(np.random.default_rng(1), 20, False)
    before, outside = sample_hashes(batch), sample_hashes(batch, ids=False)
    batch.sparse.values()[4] += 1
    changed = np.flatnonzero(sample_hashes(batch) != before)
    assert changed.tolist() == [4]
    np.testing.assert_array_equal(sample_hashes(batch, ids=False), outside)
    batch.labels[7] = 1 - batch.labels[7]
    batch.dense[9, 0] = -batch.dense[9, 0]
    assert np.flatnonzero(sample_hashes(batch) != before).tolist() == [4, 7, 9]


def test_an_id_in_another_feature_is_another_sample() -> None:
    def of(lengths: list[int]) -> int:
        ids = KeyedJaggedTensor(["a", "b"], torch.tensor([0]), lengths=torch.tensor(lengths))
        return int(sample_hashes({"ids": ids})[0])

    assert of([1, 0]) != of([0, 1])


def test_no_samples_have_no_hashes() -> None:
    batch = select(random_batch(np.random.default_rng(1), 3, True), np.arange(0))
    assert len(sample_hashes(batch)) == 0
