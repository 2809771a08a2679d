"""Coefficients of entities beside a dictionary of them that learns one entity at a time."""

from __future__ import annotations

import numpy as np
import torch
from recpipe_lambda_learner.effects import Effect, Effects, Seen
from recpipe_lambda_learner.posterior import Events, Learning, Posteriors, unlearnt, updated

from recpipe.common.loops import Spread

WIDTH, HOW = 3, Learning(ridge=2.0, keep=0.9)


def mini_batch(rng: np.random.Generator, size: int = 60) -> tuple[Seen, *tuple[np.ndarray, ...]]:
    seen = Seen(rng.zipf(1.4, size) % 40, rng.normal(size=(size, WIDTH)))
    clicks = (rng.random(size) < 0.3).astype(np.float64)
    return seen, clicks, rng.random(size) + 0.5, rng.normal(size=size)


def test_effects_learn_as_a_dictionary_of_entities_does() -> None:
    rng, effect, known = np.random.default_rng(0), Effect(WIDTH, HOW), dict[int, Posteriors]()
    for _ in range(6):
        seen, clicks, weights, offsets = mini_batch(rng)
        wanted = [
            float(known[e].means[0] @ x) if e in known else 0.0
            for e, x in zip(seen.entities.tolist(), seen.inputs, strict=True)
        ]
        np.testing.assert_allclose(effect.scores(*seen), wanted, atol=1e-12)
        effect.learn(*seen, clicks, weights, offsets)
        for entity in np.unique(seen.entities).tolist():
            own = seen.entities == entity
            ends = np.array([0, int(own.sum())])
            events = Events(seen.inputs[own], clicks[own], weights[own], offsets[own], ends)
            before = known.get(entity, unlearnt(1, WIDTH, HOW))
            known[entity], _ = updated(before, events, HOW, Spread())
    assert len(effect) == len(known) > 20


def test_a_state_goes_on_bit_for_bit() -> None:
    rng, effect, other = np.random.default_rng(1), Effect(WIDTH, HOW), Effect(WIDTH, HOW)
    for _ in range(3):
        seen, *rest = mini_batch(rng)
        effect.learn(*seen, *rest)
    other.load_state_dict({k: v.clone() for k, v in effect.state_dict().items()})
    for _ in range(3):
        seen, *rest = mini_batch(rng)
        np.testing.assert_array_equal(effect.scores(*seen), other.scores(*seen))
        effect.learn(*seen, *rest)
        other.learn(*seen, *rest)
    for name, value in effect.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_the_second_effect_learns_what_the_first_leaves() -> None:
    rng = np.random.default_rng(2)
    (users, *rest), (items, *_) = mini_batch(rng), mini_batch(rng)
    both, first, second = Effects([WIDTH, WIDTH], HOW), Effect(WIDTH, HOW), Effect(WIDTH, HOW)
    both.learn([users, items], *rest)
    clicks, weights, offsets = rest
    first.learn(*users, clicks, weights, offsets)
    second.learn(*items, clicks, weights, offsets + first.scores(*users))
    np.testing.assert_array_equal(both.scores([users, items])[0], first.scores(*users))
    np.testing.assert_array_equal(both.scores([users, items])[1], second.scores(*items))
