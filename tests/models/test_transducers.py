"""What models of histories alone promise: no event sees later ones, retrieval, and memory given for time."""

from __future__ import annotations

from dataclasses import replace
from math import log
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from recpipe.answers.export import export_dense
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.loss import LOSSES
from recpipe.models.bst import Behavior
from recpipe.models.histories import History
from recpipe.models.hstu import HSTU
from recpipe.models.sasrec import CausalTransformer
from recpipe.models.units import (
    LikeLengths,
    Moved,
    Transducer,
    buckets_between,
    of_like_length,
    rounded_up,
    values_at,
)
from tests.any_model.runs import train
from tests.any_model.zoo import TECHNIQUES, by_hand, furthest
from tests.models.formulas import (
    BUCKETS,
    Weights,
    dien,
    dien_loss,
    hstu_states,
    hstu_with_ages,
    sasrec_vectors,
)
from tests.models.published import DIM, HISTORY, TIMED, batches, in_float64, made, schema_of


def states(name: str, events: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Of each event, float32 [B, T, width]."""
    torch.manual_seed(5)
    if name == "hstu":
        history = History(events, present, torch.zeros(len(events), DIM))
        return Transducer(HISTORY, DIM, 12, 2, 2, 0, False)(history, with_target=False)
    return CausalTransformer(HISTORY, DIM, 2, 2)(events, present)


@pytest.mark.parametrize("name", ["hstu", "sasrec"])
def test_no_event_sees_later_ones(name: str) -> None:
    torch.manual_seed(2)
    events, present = torch.randn(6, HISTORY, DIM), torch.ones(6, HISTORY, dtype=torch.bool)
    present[:3, :2] = False
    changed = events.clone()
    changed[:, 3] = torch.randn(6, DIM)
    before, after = states(name, events, present), states(name, changed, present)
    assert torch.equal(before[:, 2], after[:, 2])
    assert (before[:, 3:] - after[:, 3:]).abs().amax((1, 2)).min() > 1e-3  # all that see it
    absent = events.masked_fill(~present.unsqueeze(2), 7.0)
    assert torch.equal(states(name, absent, present)[:, 2:], before[:, 2:])


def test_retrieval_gives_two_vectors() -> None:
    schema = schema_of("hstu")
    (batch,) = batches(schema, 1)
    model = made("sasrec", "model.retrieval=true")
    found = model(batch.dense_features, batch.sparse_features)
    query, candidate = sasrec_vectors(Weights(model), batch)
    torch.testing.assert_close(found, {"query": query, "candidate": candidate}, rtol=1e-5, atol=1e-5)

    model = made("hstu", "model.retrieval=true")
    found = model(batch.dense_features, batch.sparse_features)
    w, queries, candidates = Weights(model), [], []
    for events, target in w.history(batch):
        queries.append(hstu_states(w, events, HISTORY)[-1] if len(events) else torch.zeros(12))
        candidates.append(w["candidate.weight"] @ target)
    query = w.last_layers("top", w.context(batch, schema)) + torch.stack(queries)
    wanted = {"query": query, "candidate": torch.stack(candidates)}
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_times_between_events_are_in_buckets() -> None:
    found = buckets_between(torch.tensor([[86400.0, 3600.0, 60.0, 60.0, 0.0]]), 30)[0]
    hour, minute, second = (int(log(s) / 0.301) for s in (86400 - 3600, 3600 - 60, 60))
    # What follows the first event is asked for at the time of the second.
    assert found.diagonal().tolist() == [29, minute, 0, second, 0]
    assert hour > 30  # the last bucket has all beyond
    assert found[-1].tolist() == [29, int(log(3600) / 0.301), second, second, 0]


def test_ages_of_events_bias_attention() -> None:
    model = made("hstu", f"model.time_buckets={BUCKETS}", schema=TIMED)
    (batch,) = batches(TIMED, 1)
    with in_float64(model, batch), torch.no_grad():
        found = model(batch.dense_features, batch.sparse_features)
        wanted = hstu_with_ages(Weights(model), batch, TIMED)
        batch.dense[:, 1 : HISTORY + 1] *= 3  # all but the latest
        other = model(batch.dense_features, batch.sparse_features)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert (other - wanted).abs().max() > 1e-4
    with pytest.raises(UserError, match="6 of the latest events of items are looked at, and the ages of 5"):
        made("hstu", "model.history=6", schema=TIMED)


@pytest.mark.soak  # it compiles a package
def test_a_model_with_ages_trains_as_by_hand_and_can_be_packaged() -> None:
    rows = batches(TIMED, 3)
    # By SGD: some bucket's gradient is all but 0, of which Adagrad makes a step as long as of any other.
    theirs = by_hand(made("hstu", schema=TIMED), rows, "sgd")
    mine = train(made("hstu", schema=TIMED), rows, "sgd", *TECHNIQUES["hotline"][:-1])
    assert furthest(mine, theirs) < 1e-6
    called = Called(made("hstu", schema=TIMED), LOSSES["binary_cross_entropy"])
    assert export_dense(called, TIMED, ["items", "kinds", "tags"]).tables


def test_dien_learns_next_events_too() -> None:
    schema = schema_of("dien")
    (batch,) = batches(schema, 1)
    model = made("dien", "model.auxiliary=1")
    with in_float64(model, batch), torch.no_grad():
        batch.labels = batch.labels.double()
        loss, logits = model(batch.dense_features, batch.sparse_features, batch.labels)
        torch.testing.assert_close(logits, dien(Weights(model), batch, schema), rtol=1e-9, atol=1e-9)
        wanted = dien_loss(Weights(model), batch, logits)
        torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9)
        weights = torch.rand(batch.size)
        weighed, _ = model(batch.dense_features, batch.sparse_features, batch.labels, weights)
        bare = F.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels, reduction="none")
    torch.testing.assert_close(weighed - loss, ((weights - 1) * bare).mean(), rtol=1e-9, atol=1e-9)
    rows, name = batches(schema, 2), ("dien", "model.auxiliary=1")
    own = lambda m, b: m(b.dense_features, b.sparse_features, b.labels)[0]  # noqa: E731
    with patch("tests.any_model.zoo.loss_of", own):
        theirs = by_hand(made(*name), rows, "rowwise_adagrad")
    assert furthest(train(made(*name), rows, "rowwise_adagrad"), theirs) < 1e-5
    with pytest.raises(UserError, match="DIEN's loss compares samples of a batch"):
        train(made(*name), rows, "rowwise_adagrad", *TECHNIQUES["hotline"][:-1])
    bare = train(made("dien"), rows, "rowwise_adagrad")
    assert furthest(bare, theirs) > 1e-3


def test_checkpointed_activations_give_the_same_gradients() -> None:
    (batch,) = batches(schema_of("hstu"), 1)
    found, counts = [], []
    for words in ((), ("model.activation_checkpointing=true",)):
        model, calls = made("hstu", *words), []
        assert isinstance(model, HSTU)
        model.transducers[0].units[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model(batch.dense_features, batch.sparse_features).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0]  # once more in the backward pass
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(gradient.any() for gradient in found[0])


def test_no_samples_give_no_states() -> None:
    none = History(torch.zeros(0, 5, DIM), torch.zeros(0, 5, dtype=torch.bool), torch.zeros(0, DIM))
    assert Transducer(6, DIM, 12, 2, 2, 0, False)(none, with_target=True).shape == (0, 6, 12)
    assert Behavior(5, DIM, 4, 1, 2)(none).shape == (0, 6 * 12)
    assert states("sasrec", none.events, none.present).shape == (0, 5, DIM)


def test_widths_that_heads_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="model.heads=5 does not divide model.width=12"):
        made("hstu", "model.heads=5")
    with pytest.raises(UserError, match="model.heads=5 does not divide the width of an event, 16"):
        made("sasrec", "model.heads=5")


@pytest.mark.parametrize("with_target", [False, True])
def test_samples_beside_those_of_like_length_are_as_in_one_block(with_target: bool) -> None:
    torch.manual_seed(3)
    lengths = torch.tensor([7, 0, 20, 1, 16, 17, 2, 3, 9])
    present = torch.arange(20) >= 20 - lengths.unsqueeze(1)
    history = History(torch.randn(9, 20, DIM), present, torch.randn(9, DIM).double(), torch.rand(9, 20) * 1e4)
    found, shapes = [], []
    for like in (of_like_length, lambda lengths: [(torch.arange(len(lengths)), int(lengths.amax()))]):
        torch.manual_seed(5)
        transducer, own = Transducer(21, DIM, 12, 2, 2, 8, False).double(), []
        transducer.units[0].register_forward_pre_hook(
            lambda _, given, own=own: own.extend(block.present.shape for block in given[1])
        )
        events = history.events.double().requires_grad_()
        with patch("recpipe.models.units.of_like_length", like):
            states = transducer(replace(history, events=events), with_target)
            shapes.append([tuple(shape) for shape in own])
            latest = transducer(replace(history, events=events), with_target, latest=True)
        torch.testing.assert_close(latest, states[:, -1], rtol=1e-12, atol=1e-12)
        states.square().sum().backward()
        found.append([states, events.grad, *(own.grad for own in transducer.parameters())])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert found[0][0][~F.pad(present, (0, int(with_target)), value=True)].count_nonzero() == 0
    assert shapes[1] == [(9, 20 + with_target)]
    assert shapes[0] == (
        [(1, 1), (1, 2), (2, 4), (1, 8), (1, 16), (3, 21)]
        if with_target
        else [(2, 1), (1, 2), (1, 4), (1, 8), (2, 16), (2, 20)]
    )


def test_numbers_of_samples_that_a_kernel_is_made_for_are_few() -> None:
    sizes = {count: rounded_up(count) for count in range(1, 2000)}
    assert all(count <= size < count * 1.125 for count, size in sizes.items())
    assert len({size for count, size in sizes.items() if 512 <= count <= 1024}) == 9
    present = torch.ones(17, 3, dtype=torch.bool)
    present[16, :2] = False
    order = LikeLengths(present)
    assert [tuple(places.shape) for places in order.blocks] == [(1, 1), (16, 3)]
    assert len(order.taken) == 52  # of 49
    events = torch.randn(51, 2, dtype=torch.float64, requires_grad=True)
    taken = Moved.apply(events, order.taken, order.places)
    assert taken[49:].count_nonzero() == 0
    assert torch.equal(taken[0], events[50])
    assert torch.autograd.gradcheck(Moved.apply, (events, order.taken, order.places))


def test_values_at_places_have_the_gradient_of_an_embedding() -> None:
    values, places = torch.randn(5, requires_grad=True), torch.tensor([[0, 3, 3], [2, 0, 3]])
    weights, found = torch.randn(2, 3), values_at(values, places)
    assert torch.equal(found, values[places])
    found.backward(weights)
    wanted = torch.zeros(5).index_put((places,), weights, accumulate=True)
    torch.testing.assert_close(values.grad, wanted)
