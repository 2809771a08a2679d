"""Batches of any type, cut by sample: every part against the samples put together one by one."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.data.parts import Asked, batch_size, find_ids, ids_at, keeping_ids, tensors_of
from recpipe.data.select import select
from recpipe.errors import UserError
from recpipe.plugin.batch import Batch, BatchShare

SIZE = 9
KEYS = ["a", "b", "c"]


def keyed(seed: int, longest: int, weighted: bool, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Bags of 0 to ``longest`` ids; of exactly one id where ``longest`` is 1."""
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(int(longest == 1), longest + 1, len(KEYS) * SIZE))
    total = int(lengths.sum())
    weights = torch.from_numpy(rng.random(total, np.float32)) if weighted else None
    return KeyedJaggedTensor(
        KEYS, torch.from_numpy(rng.integers(0, 99, total)).to(dtype), weights, lengths=lengths
    )


def jagged(seed: int) -> JaggedTensor:
    """Vectors of the history of each sample."""
    lengths = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, SIZE))
    return JaggedTensor(torch.randn(int(lengths.sum()), 2), lengths=lengths)


def bags_of(part: JaggedTensor) -> list[tuple[list[Any], list[float] | None]]:
    """Ids and weights of each sample."""
    ends = part.offsets().tolist()
    weights = part.weights_or_none()
    return [
        (part.values()[low:high].tolist(), None if weights is None else weights[low:high].tolist())
        for low, high in pairwise(ends)
    ]


ORDERS = {
    "a permutation": np.random.default_rng(0).permutation(SIZE),
    "some": np.array([7, 2, 3]),
    "one": np.array([4]),
    "none": np.empty(0, np.int64),
    "twice": np.array([1, 1, 0]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("longest", "dtype"), [(1, torch.int64), (1, torch.int32), (5, torch.int32)])
def test_jagged_tensors(order: str, weighted: bool, longest: int, dtype: torch.dtype) -> None:
    whole, history, samples = keyed(1, longest, weighted, dtype), jagged(2), ORDERS[order]
    part, kept = select((whole, history), samples)
    assert part.keys() == KEYS
    assert part.values().dtype == dtype
    assert part.stride() == len(samples)
    for key in KEYS:
        bags = bags_of(whole[key])
        assert bags_of(part[key]) == [bags[i] for i in samples]
    bags = bags_of(history)
    assert bags_of(kept) == [bags[i] for i in samples]


@dataclasses.dataclass
class Towers:
    query: KeyedJaggedTensor
    candidate: KeyedJaggedTensor
    labels: dict[str, torch.Tensor]
    temperature: torch.Tensor
    name: str = "towers"


class Pair(NamedTuple):
    towers: Towers
    extra: list[torch.Tensor]


class Plain:
    """An object with attributes, whose constructor nobody can call."""

    def __init__(self, secret: int) -> None:
        self.ids, self.table = keyed(3, 2, False), torch.arange(4.0)


@dataclasses.dataclass(frozen=True)
class Own:
    """Negatives that all samples share: only its author can tell what a part of it is."""

    ids: torch.Tensor
    negatives: KeyedJaggedTensor

    def select(self, samples: np.ndarray) -> Own:
        return Own(self.ids[samples], self.negatives)


def test_nested_batches() -> None:
    labels = {"click": torch.arange(SIZE), "vector": torch.randn(SIZE, 3)}
    towers = Towers(keyed(4, 3, False), keyed(5, 1, True), labels, torch.tensor(0.5))
    pair = Pair(towers, [torch.randn(SIZE, 2), torch.randn(SIZE + 1)])
    samples = ORDERS["some"]
    part = select(pair, samples)
    assert type(part) is Pair
    assert type(part.towers) is Towers
    assert part.towers.name == "towers"
    assert part.towers.labels["click"].tolist() == samples.tolist()
    assert torch.equal(part.towers.labels["vector"], labels["vector"][samples])
    assert part.towers.temperature is towers.temperature
    assert bags_of(part.towers.candidate["b"]) == [bags_of(towers.candidate["b"])[i] for i in samples]
    assert torch.equal(part.extra[0], pair.extra[0][samples])
    assert part.extra[1] is pair.extra[1], "no tensor of the batch's samples"
    assert towers.query.stride() == SIZE, "the whole batch stays as it is"


def test_objects_and_their_own_select() -> None:
    plain = Plain(1)
    part = select(plain, ORDERS["some"])
    assert type(part) is Plain
    assert part.ids.stride() == 3
    assert part.table is plain.table
    own = Own(torch.arange(SIZE), keyed(6, 2, False))
    assert select(own, ORDERS["some"]).negatives is own.negatives
    assert select({"x": torch.zeros(SIZE), "own": own}, ORDERS["one"])["own"].ids.tolist() == [4]


@pytest.mark.parametrize("cls", [Batch, TorchRecBatch], ids=lambda cls: cls.__module__)
def test_batches_of_clicks(cls: Any) -> None:
    batch = cls(torch.randn(SIZE, 2), keyed(7, 2, False), torch.rand(SIZE))
    order = ORDERS["a permutation"]
    back = select(select(batch, order), np.argsort(order))
    assert type(back) is cls
    names = ("dense", "sparse") if cls is Batch else ("dense_features", "sparse_features")
    for name in (*names, "labels"):
        ours, theirs = getattr(back, name), getattr(batch, name)
        if isinstance(ours, KeyedJaggedTensor):
            assert torch.equal(ours.lengths(), theirs.lengths())
            ours, theirs = ours.values(), theirs.values()
        assert torch.equal(ours, theirs)


def test_a_share_stays_one() -> None:
    batch = Batch(torch.randn(SIZE, 2), keyed(8, 2, False), torch.rand(SIZE))
    part = select(BatchShare.of(batch, 40), ORDERS["some"])
    assert (type(part), part.size, part.total) == (BatchShare, 3, 40)


def test_batch_sizes() -> None:
    assert batch_size({"table": torch.zeros(4), "ids": keyed(9, 2, False)}) == SIZE
    assert batch_size([torch.tensor(1.0), torch.zeros(6, 2)]) == 6
    with pytest.raises(UserError, match="a batch of type dict holds no tensor"):
        batch_size({"a": 1})


def test_what_cannot_be_cut_is_refused() -> None:
    ids = keyed(10, 2, False)
    fewer = select(ids, ORDERS["some"])
    with pytest.raises(UserError, match="type list has parts of 3 and 9 samples.*a method select"):
        select([ids, fewer], ORDERS["one"])
    uneven = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(5),
        lengths=torch.tensor([1, 1, 3]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(UserError, match="keys have different numbers of samples cannot be cut by sample"):
        select(uneven, ORDERS["one"])


def test_tensors_have_the_names_by_which_a_user_finds_them() -> None:
    towers = Towers(keyed(1, 2, False), keyed(2, 2, True), {"click": torch.rand(SIZE)}, torch.tensor(0.5))
    pair = Pair(towers, [torch.rand(SIZE), torch.arange(SIZE)])
    named = dict(tensors_of(pair))
    assert [*named] == ["towers.candidate.weights", "towers.labels.click", "towers.temperature", "extra.0"]
    assert named["towers.candidate.weights"] is towers.candidate.weights()
    assert [name for name, _ in tensors_of(jagged(3), "history")] == ["history.values"]
    assert [name for name, _ in tensors_of(torch.rand(2))] == ["values"]


def test_a_part_has_one_place_whoever_looks_for_it() -> None:
    towers = Towers(keyed(1, 2, False), keyed(2, 2, True), {"click": torch.rand(SIZE)}, torch.tensor(0.5))
    pair = Pair(towers, [torch.rand(SIZE)])
    asked: Asked = {}
    kept = keeping_ids(pair, asked)
    assert [*asked] == [("towers", "query"), ("towers", "candidate")]
    assert find_ids(pair, KEYS) == find_ids(kept, KEYS) == (("towers", "query"),)
    assert find_ids(pair, ["a", "z"]) == ()
    assert ids_at(pair, [("towers", "query")]) is towers.query
    assert ids_at(kept, [("towers", "query")]).host is towers.query
