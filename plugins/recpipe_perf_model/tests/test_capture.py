"""What is captured of a model's step: its operators by stage, its lookups, and nothing changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_perf_model.kernels.operators import watched
from recpipe_perf_model.step.capture import Captured, captured
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.backend.choices import Choices
from recpipe.backend.convert import convert
from recpipe.common.loops import TOLD
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.batch import Batch
from tests.pipeline.samples import placed, random_batch
from tests.profiling.test_traced import bags
from tests.tables.samples import DIM, FEATURES

SAMPLES = 48
BATCH = random_batch(np.random.default_rng(3), SAMPLES, True)


def dlrm(converted: bool = False, choices: Choices | None = None) -> PlacedModel:
    module = DLRM(bags(), 3, [5, DIM], [6, 1])
    if converted:
        convert(module, choices)
    return placed(module, BATCH)


def kinds(found: Captured, stage: int) -> Counter[str]:
    return Counter(operator.kind for operator in found.whole.operators[stage])


def test_each_layer_is_there_forward_and_back() -> None:
    """Four layers: two before the rows are needed; back, the top's gradients come before the rows'."""
    found = captured(dlrm(), BATCH)
    before, forward, to_rows, rest = (kinds(found, stage) for stage in range(4))
    assert before["addmm"] == forward["addmm"] == 2
    assert to_rows["mm nn"] + to_rows["mm tn"] == 4
    assert rest["mm nn"] + rest["mm tn"] == 3  # the batch itself has no gradient
    assert (forward["bmm nt"], to_rows["bmm nn"] + to_rows["bmm tn"]) == (1, 2)
    assert not found.whole.unknown
    first = next(o for o in found.whole.operators[0] if o.kind == "addmm")
    assert [first.at[name] for name in "mnk"] == [SAMPLES, 5, 3]
    assert found.whole.nodes > 10
    assert found.parameters == (8, sum(p.numel() for p in dlrm().dense))


def test_a_converted_model_is_captured_as_it_runs() -> None:
    """Not as its class would run, which a global hook brings about."""
    found = captured(dlrm(converted=True), BATCH)
    assert found.whole.functions == 3
    assert kinds(found, 1)["take index_select"] == 1
    assert not kinds(found, 1)["take index"]
    assert captured(dlrm(), BATCH).whole.functions == 0


def test_loops_are_captured_in_place_of_operators() -> None:
    part = f"dot {len(FEATURES)}x{DIM}"
    model = dlrm(True, {part: {str(torch.get_num_threads()): {str(SAMPLES): "loops"}}})
    (group,) = model.embeddings.tables.groups
    group.tables.kernel.faster = lambda: True
    found = captured(model, BATCH)
    assert kinds(found, 1)["pairs forward"] == kinds(found, 2)["pairs backward"] == 1
    assert not any(kind.startswith("bmm") for stage in range(4) for kind in kinds(found, stage))
    (pairs,) = (each for each in found.whole.operators[1] if each.kind == "pairs forward")
    assert pairs.at["elements"] == SAMPLES * len(FEATURES) * (len(FEATURES) + 1) / 2 * DIM
    assert pairs.at["results"] == SAMPLES * (DIM + len(FEATURES) * (len(FEATURES) + 1) / 2)
    assert [group.by_loops for group in found.groups] == [True]
    assert not TOLD
    assert not captured(dlrm(), BATCH).groups[0].by_loops


def test_nothing_is_left_behind() -> None:
    model = dlrm()
    before = [p.detach().clone() for p in model.dense]
    random = torch.get_rng_state()
    first, again = captured(model, BATCH, [16, SAMPLES]), captured(model, BATCH, [16, SAMPLES])
    assert all(torch.equal(a, b) for a, b in zip(before, model.dense, strict=True))
    assert all(p.grad is None for p in model.dense)
    assert torch.equal(torch.get_rng_state(), random)
    assert first.groups == again.groups
    assert [len(stage) for stage in first.whole.operators] == [len(s) for s in again.whole.operators]


def test_the_cores_shares_are_captured_each_alone() -> None:
    found = captured(dlrm(), BATCH, [16, SAMPLES])
    assert [part.samples for part in found.shares] == [16, 32]
    assert [part.threads for part in found.shares] == [1, 1]
    sizes = [next(o for o in part.operators[0] if o.kind == "addmm").at["m"] for part in found.shares]
    assert sizes == [16, 32]
    assert not captured(dlrm(), BATCH, [SAMPLES]).shares


def test_lookups_are_those_of_the_batch() -> None:
    (group,) = captured(dlrm(), BATCH).groups
    assert group.lookups == len(BATCH.sparse.values())
    assert [table.bags for table in group.tables] == [SAMPLES] * len(FEATURES)
    assert [table.rows for table in group.tables] == [feature.rows for feature in FEATURES]
    ids = BATCH.sparse[FEATURES[0].name].values()
    assert group.tables[0].distinct == len(ids.unique())
    assert group.handed_out == SAMPLES * len(FEATURES) * DIM


def with_ids(value: int, lengths: int) -> Batch:
    names = [feature.name for feature in FEATURES]
    counts = torch.full((len(names) * SAMPLES,), lengths, dtype=torch.long)
    ids = torch.full((int(counts.sum()),), value, dtype=torch.long)
    return Batch(BATCH.dense, KeyedJaggedTensor(names, ids, lengths=counts), BATCH.labels)


def test_one_distinct_id_and_tables_that_are_never_looked_up() -> None:
    (same,) = captured(dlrm(), with_ids(0, 2)).groups
    assert [(table.lookups, table.distinct) for table in same.tables] == [(2 * SAMPLES, 1)] * len(FEATURES)
    (none,) = captured(dlrm(), with_ids(0, 0)).groups
    assert none.lookups == 0
    assert none.handed_out > 0


class Refuses(nn.Module):
    def __init__(self, fault: Exception) -> None:
        super().__init__()
        self.rows, self.fault = bags(), fault

    def forward(self, batch: Any) -> torch.Tensor:
        self.rows(batch.sparse)
        raise self.fault


def test_a_model_that_cannot_be_run_is_one_clear_line() -> None:
    with pytest.raises(UserError) as refused:
        captured(placed(Refuses(RuntimeError("no\nway")), BATCH), BATCH)
    assert "Refuses cannot be traced (RuntimeError: " in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="^my own words$"):
        captured(placed(Refuses(UserError("my own words")), BATCH), BATCH)


def test_a_batch_without_samples_is_refused() -> None:
    empty = KeyedJaggedTensor(
        [f.name for f in FEATURES], torch.empty(0).long(), lengths=torch.empty(0).long()
    )
    with pytest.raises(UserError, match="without samples"):
        captured(dlrm(), Batch(BATCH.dense[:0], empty, BATCH.labels[:0]))


X, WIDE = torch.ones(6, 8), torch.ones(6, 10)


@pytest.mark.parametrize(
    ("run", "kind", "at"),
    [
        (lambda: torch.addmm(torch.ones(4), X, torch.ones(4, 8).t()), "addmm", {"m": 6, "n": 4, "k": 8}),
        (lambda: X.t() @ torch.ones(6, 3), "mm tn", {"m": 8, "n": 3, "k": 6}),
        (lambda: torch.bmm(X[None], X.t()[None]), "bmm nt", {"b": 1, "m": 6, "n": 6, "k": 8}),
        (lambda: torch.relu(X), "elementwise", {"bytes": 2 * 192, "elements": 48, "runs": 0}),
        (lambda: WIDE[:, 2:] + X, "elementwise", {"bytes": 3 * 192, "runs": 6}),
        (lambda: torch.cat((X, WIDE), dim=1), "cat", {"elements": 108, "bytes": 8 * 108, "runs": 12}),
        (lambda: X.sum(0), "sum 0", {"elements": 48}),
        (lambda: X.sum(1), "sum 1", {"elements": 48}),
        (lambda: X.sum(), "sum", {"elements": 48}),
        (lambda: X.bfloat16(), "cast to bfloat16", {"bytes": 192 + 96}),
        (lambda: X.index_select(1, torch.tensor([0, 3])), "take index_select", {"elements": 12}),
        (lambda: X.t().contiguous(), "transpose", {"elements": 48}),
        (lambda: X.expand(5, 6, 8) * 2, "elementwise", {"bytes": 192 + 5 * 192}),
        (lambda: X.view(-1), "view", {}),
        (lambda: torch.cumsum(X, 0), "elementwise", {"bytes": 2 * 192}),
    ],
)
def test_operators_have_the_sizes_of_their_tensors(run: Any, kind: str, at: dict[str, float]) -> None:
    found = [each for each in watched(run) if each.kind != "view"] or list(watched(run))
    operator = found[-1]
    assert operator.kind == kind
    assert {name: operator.at[name] for name in at} == at


def test_an_operator_without_a_model_is_named() -> None:
    assert [each.known for each in watched(lambda: torch.cumsum(X, 0))] == [False]


def test_memory_that_was_just_touched_is_near() -> None:
    """The second sum finds what the first one has read; the last one comes after 4 MiB of other memory."""
    other = torch.ones(1 << 20)

    def run() -> None:
        X.sum()
        X.sum()
        other.sum()
        X.sum()

    first, second, _, last = (float(each.at["reuse"]) for each in watched(run) if each.kind == "sum")
    assert second < 1000 < (4 << 20) < last < first
