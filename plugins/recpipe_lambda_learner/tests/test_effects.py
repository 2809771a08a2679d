"""Coefficients of entities beside a dictionary of them that learns one entity at a time; their rows."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recpipe_lambda_learner.effects import Effect, Effects, Seen
from recpipe_lambda_learner.posterior import Events, Learning, Posteriors, packed, unlearnt, unpacked, updated
from recpipe_lambda_learner.rows import Keeping

from recpipe.answers.effects import Learnt, LearntEffect, newest_effects, write_effects
from recpipe.common.loops import Spread
from recpipe.common.saved import read_json
from recpipe.errors import UserError

WIDTH, HOW = 3, Learning(ridge=2.0, keep=0.9)
FEW = Keeping(12)
"""Fewer rows than there are entities."""


def mini_batch(rng: np.random.Generator, size: int = 60) -> tuple[Seen, *tuple[np.ndarray, ...]]:
    seen = Seen(rng.zipf(1.4, size) % 40 - 9, rng.normal(size=(size, WIDTH)))
    clicks = (rng.random(size) < 0.3).astype(np.float64)
    return seen, clicks, rng.random(size) + 0.5, rng.normal(size=size)


def saved(effect: Effect, directory: Path) -> dict[str, bytes]:
    """The bytes of what it saves, by file."""
    directory.mkdir()
    effect.rows.save(directory)
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_effects_learn_as_a_dictionary_of_entities_does(tmp_path: Path) -> None:
    rng, known = np.random.default_rng(0), dict[int, Posteriors]()
    effects = [Effect("user", WIDTH, HOW), Effect("user", WIDTH, HOW, Keeping(50, "ssd", tmp_path / "ssd"))]
    for _ in range(6):
        seen, clicks, weights, offsets = mini_batch(rng)
        wanted = [
            float(known[e].means[0] @ x) if e in known else 0.0
            for e, x in zip(seen.entities.tolist(), seen.inputs, strict=True)
        ]
        for effect in effects:
            np.testing.assert_allclose(effect.scores(*seen), wanted, atol=1e-12)
            effect.learn(*seen, clicks, weights, offsets)
        for entity in np.unique(seen.entities).tolist():
            own = seen.entities == entity
            ends = np.array([0, int(own.sum())])
            events = Events(seen.inputs[own], clicks[own], weights[own], offsets[own], ends)
            before = known.get(entity, unlearnt(1, WIDTH, HOW))
            known[entity], _ = updated(before, events, HOW, Spread())
    assert len(effects[0]) == len(known) > 20
    one, two = (saved(effect, tmp_path / str(n)) for n, effect in enumerate(effects))
    assert one["user.safetensors"] == two["user.safetensors"]
    effects[1].rows.close()
    assert not (tmp_path / "ssd").exists()


@pytest.mark.parametrize("kind", ["full", "diagonal", "identity"])
def test_a_row_has_a_precision_as_it_is(kind: str) -> None:
    rng, how = np.random.default_rng(3), Learning(precision=kind)  # type: ignore[arg-type]
    root = rng.normal(size=(5, WIDTH, WIDTH))
    whole = {"full": root @ root.transpose(0, 2, 1), "diagonal": root[:, 0], "identity": np.empty((5, 0))}[
        kind
    ]
    rows = packed(whole)
    assert rows.shape == (5, how.kept(WIDTH))
    np.testing.assert_array_equal(unpacked(rows, WIDTH, how.precision), whole)


def test_who_was_seen_longest_ago_makes_room_and_begins_anew() -> None:
    effect, rng = Effect("user", WIDTH, HOW, Keeping(2)), np.random.default_rng(4)

    def learn(*entities: int) -> None:
        size = len(entities)
        arrays = rng.random(size) < 0.5, np.ones(size), np.zeros(size)
        effect.learn(np.array(entities), np.ones((size, WIDTH)), *(a.astype(float) for a in arrays))

    inputs = np.ones((1, WIDTH))
    for entity in (1, 2, 1, 3):
        learn(entity)
    assert effect.scores(np.array([2]), inputs) == 0
    assert effect.scores(np.array([1]), inputs) != 0
    first = Effect("user", WIDTH, HOW)
    first.learn(np.array([2]), inputs, np.ones(1), np.ones(1), np.zeros(1))
    effect.learn(np.array([2]), inputs, np.ones(1), np.ones(1), np.zeros(1))
    assert effect.scores(np.array([2]), inputs) == first.scores(np.array([2]), inputs)
    # More new ones in a mini-batch than rows: those without one are not learnt, and their score is 0.
    learn(7, 8, 9)
    assert [float(effect.scores(np.array([e]), inputs)[0]) != 0 for e in (7, 8, 9)] == [True, True, False]


def test_a_state_goes_on_bit_for_bit_also_where_rows_have_run_out(tmp_path: Path) -> None:
    rng, effect, other = (
        np.random.default_rng(1),
        Effect("u/x", WIDTH, HOW, FEW),
        Effect("u/x", WIDTH, HOW, FEW),
    )
    for _ in range(3):
        seen, *rest = mini_batch(rng)
        effect.learn(*seen, *rest)
    saved(effect, tmp_path / "half")
    other.rows.load(tmp_path / "half")
    for _ in range(3):
        seen, *rest = mini_batch(rng)
        np.testing.assert_array_equal(effect.scores(*seen), other.scores(*seen))
        effect.learn(*seen, *rest)
        other.learn(*seen, *rest)
    assert effect.rows.map.content.figures.evicted > 10
    assert saved(effect, tmp_path / "one") == saved(other, tmp_path / "two")
    wider = Effect("u/x", WIDTH + 1, HOW, FEW)
    with pytest.raises(UserError, match=r"has not the rows of u/x's effect \(means is F64"):
        wider.rows.load(tmp_path / "one")


LEARNT = Learnt("model", "digest", 0, 12, 2.0, 0.9, "full", (LearntEffect("user", ("price",), WIDTH),))


def learn_and_save(folder: Path, last: int) -> Effects:
    """Learn mini-batches up to ``last``, going on from what ``folder`` has; save after each one."""
    effects, rng, done = Effects({"user": WIDTH}, HOW, FEW), np.random.default_rng(5), 0
    if any(folder.glob("effects/[0-9]*")):
        directory, learnt = newest_effects(folder)
        effects.load(directory)
        done = learnt.number
    for number in range(1, last + 1):
        seen, *rest = mini_batch(rng)
        if number > done:
            effects.learn([seen], *rest)
            write_effects(folder / "effects", Learnt(**{**vars(LEARNT), "number": number}), effects.save)
    return effects


def test_the_newest_state_is_found_while_newer_ones_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the last one, the run has written the next before one that was found is read."""

    def write(number: int) -> None:
        write_effects(tmp_path / "effects", replace(LEARNT, number=number), lambda folder: None)

    def read(file: Path) -> object:
        if file.parent.name in ("000000001", "000000002"):
            write(int(file.parent.name) + 1)
        return read_json(file)

    write(1)
    monkeypatch.setattr("recpipe.answers.effects.read_json", read)
    directory, learnt = newest_effects(tmp_path)
    assert (directory.name, learnt.number) == ("000000003", 3)
    (directory / "effects.json").unlink()
    with pytest.raises(UserError, match="no coefficients of entities"):
        newest_effects(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("kills", [20])
def test_killed_at_any_moment_it_goes_on_as_if_it_had_not_been(kills: int, tmp_path: Path) -> None:
    def number() -> int:
        return newest_effects(tmp_path)[1].number if any(tmp_path.glob("effects/[0-9]*")) else 0

    code = (
        "from pathlib import Path; from recpipe_lambda_learner.tests.test_effects import learn_and_save; "
        f"learn_and_save(Path({str(tmp_path)!r}), 10**9)"
    )
    draw = random.Random(0)
    for _ in range(kills):
        before = number()
        child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
        while child.poll() is None and number() < before + 3:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    last = number() + 3
    through, went_on = learn_and_save(tmp_path / "through", last), learn_and_save(tmp_path, last)
    assert saved(through.each[0], tmp_path / "one") == saved(went_on.each[0], tmp_path / "two")
    assert len([*(tmp_path / "effects").iterdir()]) == 1, "what is left of earlier ones has gone"


def test_the_second_effect_learns_what_the_first_leaves() -> None:
    rng = np.random.default_rng(2)
    (users, *rest), (items, *_) = mini_batch(rng), mini_batch(rng)
    both = Effects({"user": WIDTH, "item": WIDTH}, HOW)
    first, second = Effect("user", WIDTH, HOW), Effect("item", WIDTH, HOW)
    both.learn([users, items], *rest)
    clicks, weights, offsets = rest
    first.learn(*users, clicks, weights, offsets)
    second.learn(*items, clicks, weights, offsets + first.scores(*users))
    one, two = both.each
    np.testing.assert_array_equal(one.scores(*users), first.scores(*users))
    np.testing.assert_array_equal(two.scores(*items), second.scores(*items))
    wanted = offsets + first.scores(*users) + second.scores(*items)
    np.testing.assert_array_equal(both.logits([users, items], offsets), wanted)
