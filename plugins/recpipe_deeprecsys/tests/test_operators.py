"""What operators do, against counts by hand; and steps that are watched do what steps do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from recpipe_deeprecsys.characterize.operators import (
    BACKWARD,
    FC,
    FORWARD,
    INTERACTION,
    LOOKUP,
    MANIPULATION,
    OPTIMIZER,
    OTHER,
    UPDATE,
    Timed,
    Watched,
)
from recpipe_deeprecsys.characterize.steps import Inference, TrainingStep, of_model
from torchrec.models.dlrm import DLRM

from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step import StepTimes, accumulate
from tests.pipeline.samples import placed, random_batch
from tests.profiling.test_traced import bags
from tests.tables.samples import DIM, FEATURES, dump, identical

M = 12
BATCH = random_batch(np.random.default_rng(3), M, True)
VECTORS = len(FEATURES) + 1


def dlrm() -> PlacedModel:
    torch.manual_seed(1)
    return placed(DLRM(bags(), 3, [5, DIM], [6, 1]), BATCH)


def watched(run: Any) -> list[Timed]:
    found = Watched()
    with found.step(), found, torch.no_grad():
        run()
    return found.timed()


X, W, BIAS = torch.ones(M, 7), torch.ones(5, 7), torch.ones(5)
PAIRS = torch.ones(M, 4, 6)


@pytest.mark.parametrize(
    ("run", "kind", "flops", "moved"),
    [
        (lambda: torch.nn.functional.linear(X, W, BIAS), FC, 2 * M * 7 * 5, 4 * (M * 7 + 35 + 5 + M * 5)),
        (lambda: X @ W.t(), FC, 2 * M * 7 * 5, 4 * (M * 7 + 35 + M * 5)),
        (lambda: torch.bmm(PAIRS, PAIRS.mT), INTERACTION, 2 * M * 4 * 4 * 6, 4 * (M * 24 + M * 16)),
        (lambda: torch.relu(X), OTHER, M * 7, 8 * M * 7),
        (lambda: X + X, OTHER, M * 7, 12 * M * 7),
        (lambda: torch.cat([X, X], dim=1), MANIPULATION, 0, 16 * M * 7),
        (lambda: X.clone(), MANIPULATION, 0, 8 * M * 7),
        (lambda: X.index_select(1, torch.tensor([1, 2])), MANIPULATION, 0, 16 * M),
        (lambda: X.bfloat16(), MANIPULATION, 0, 6 * M * 7),
        (lambda: X.view(-1), MANIPULATION, 0, 0),
        (lambda: torch.conv1d(PAIRS, torch.ones(3, 4, 2)), FC, 2 * M * 3 * 5 * 4 * 2, None),
        (lambda: torch._foreach_mul([X, W], 2.0), OTHER, M * 7 + 35, None),
    ],
)
def test_operations_and_bytes_are_those_of_the_sizes(run: Any, kind: str, flops: int, moved: int) -> None:
    rows = [row for row in watched(run) if row.call.name != "views, empty tensors"] or watched(run)
    row = max(rows, key=lambda row: row.work.bytes)
    assert (row.call.kind, row.work.flops) == (kind, flops)
    assert moved is None or row.work.bytes == moved
    assert row.calls == 1


@pytest.mark.parametrize("samples", [1, 3, 64])
def test_a_layer_takes_two_operations_a_sample_for_each_weight(samples: int) -> None:
    (row,) = (r for r in watched(lambda: torch.addmm(BIAS, torch.ones(samples, 7), W.t())) if r.work.flops)
    assert row.work.flops / row.work.weights == 2 * samples
    assert row.work.weights == W.numel()


def by_call(rows: list[Timed], kind: str, phase: str) -> list[Timed]:
    return [row for row in rows if (row.call.kind, row.call.phase) == (kind, phase)]


def test_a_forward_pass_has_every_layer_and_lookup() -> None:
    found = of_model(dlrm(), [BATCH], 1e-3)
    layers = by_call(found.rows, FC, FORWARD)
    top = DIM + VECTORS * (VECTORS - 1) // 2
    sizes = [(3, 5), (5, DIM), (top, 6), (6, 1)]
    assert sorted(row.work.flops for row in layers) == sorted(2 * M * i * o for i, o in sizes)
    (product,) = by_call(found.rows, INTERACTION, FORWARD)
    assert product.work.flops == 2 * M * VECTORS * VECTORS * DIM
    assert product.call.part == "interaction"
    (lookup,) = by_call(found.rows, LOOKUP, FORWARD)
    ids, dim = len(BATCH.sparse.values()), 4 * DIM
    handed_out = M * len(FEATURES)
    assert lookup.work.flops == lookup.work.weights == ids * DIM
    assert lookup.work.gathered == ids * dim
    assert lookup.work.streamed == handed_out * dim + 8 * (ids + handed_out + 1)
    assert not by_call(found.rows, FC, BACKWARD)
    assert all(row.seconds > 0 for row in found.rows)
    assert found.between >= 0


def test_a_step_of_training_has_both_passes_updates_and_optimizer() -> None:
    model = dlrm()
    found = of_model(model, [BATCH], 1e-3, torch.optim.Adagrad(model.trained(), 0.1))
    forward = sum(row.work.flops for row in by_call(found.rows, FC, FORWARD))
    backward = sum(row.work.flops for row in by_call(found.rows, FC, BACKWARD))
    assert backward == 2 * forward - 2 * M * 3 * 5  # the batch itself has no gradient
    products = by_call(found.rows, INTERACTION, BACKWARD)
    assert sum(row.work.flops for row in products) == 2 * 2 * M * VECTORS * VECTORS * DIM
    (update,) = by_call(found.rows, LOOKUP, UPDATE)
    distinct = sum(len(BATCH.sparse[f.name].values().unique()) for f in FEATURES)
    record = model.embeddings.tables.groups[0].tables.record_bytes
    assert update.work.gathered == 2 * distinct * record
    assert [row for row in found.rows if row.call.phase == OPTIMIZER]


def test_a_forward_pass_is_the_models_and_changes_nothing() -> None:
    model = dlrm()
    before, tables, random = [p.clone() for p in model.dense], dump(model.embeddings), torch.get_rng_state()
    seen: list[torch.Tensor] = []
    hook = model.module.register_forward_hook(lambda *found: seen.append(found[2]))
    of_model(model, [BATCH], 1e-3)
    hook.remove()
    assert all(torch.equal(each, seen[0]) for each in seen)
    assert torch.equal(seen[0].view(-1), model.predict(BATCH).view(-1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.dense, strict=True))
    identical(tables, dump(model.embeddings))
    assert torch.equal(torch.get_rng_state(), random)
    assert "forward" not in vars(model.module.over_arch.model)  # no part is told any more


def test_a_watched_step_trains_as_a_step_does() -> None:
    """The same bits as two steps of the pipeline's own; one step less does not have them."""
    runs = []
    for kind in ("pipeline", "watched", "one less"):
        model = dlrm()
        optimizer = torch.optim.SGD(model.trained(), 0.1)
        step, watch = TrainingStep(model, [BATCH], optimizer), Watched()
        for _ in range(1 if kind == "one less" else 2):
            if kind == "pipeline":
                accumulate(model, InFlight(BATCH), StepTimes())
                optimizer.step()
                optimizer.zero_grad()
                continue
            with watch.step():
                step.run(0, watch)
        runs.append((dump(model.embeddings), [p.detach().clone() for p in model.dense]))
    (tables, dense), (others, other_dense), (_, less) = runs
    identical(tables, others)
    assert all(torch.equal(a, b) for a, b in zip(dense, other_dense, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(dense, less, strict=True))


def test_calls_alike_are_one_row_and_lower_quartiles_count() -> None:
    watch = Watched()
    for _ in range(5):
        with watch.step(), watch:
            X + X
            X + X
    (row,) = watch.timed()
    assert (row.calls, row.work.flops) == (2, 2 * M * 7)
    each = sorted(next(iter(step.values())).seconds for step in watch.steps)
    assert row.seconds == each[1]


def test_steps_take_batches_in_turn() -> None:
    model, others = dlrm(), [random_batch(np.random.default_rng(n), M, True) for n in range(2)]
    step = Inference(model, others)
    watch = Watched()
    for number in range(2):
        with watch.step():
            step.run(number, watch)
    (lookup,) = (row for row in watch.timed() if row.call.kind == LOOKUP)
    assert lookup.work.gathered == 4 * DIM * sum(len(o.sparse.values()) for o in others) / 2
