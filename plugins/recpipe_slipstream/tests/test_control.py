"""The control: as many inputs are left out, and not the stale ones."""

from __future__ import annotations

import numpy as np
import pytest
from recpipe_slipstream.classifier import InputClassifier, Marks, at_random, in_steps
from recpipe_slipstream.plugin import Slipstream
from recpipe_slipstream.tests.rig import defaults

from recpipe.plugin import PluginError
from recpipe.plugin.bags import Bags

SIZE = 400


def batch() -> Bags:
    """Of each sample one lookup: of row 0 (hot), 1 (stale) or 2 (cold)."""
    return Bags(np.arange(SIZE, dtype=np.int64) % 3, np.arange(SIZE + 1), SIZE)


def kept(random_seed: int | None, number: int = 9, step: int = 1) -> np.ndarray:
    classifier = InputClassifier(None, lambda found: found, step, random_seed)  # type: ignore[arg-type, return-value]
    classifier.marks = (Marks(0, np.array([0, 1]), np.array([False, True]), 3),)
    found = classifier.keep(batch(), number)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_as_many_hot_inputs_are_left_out_but_any_of_them() -> None:
    rows = batch().rows
    stale, control = kept(None), kept(5)
    assert stale.sum() == control.sum() == (rows != 1).sum()
    assert np.array_equal(~stale, rows == 1)
    assert control[rows == 2].all(), "a cold input is never left out"
    share = (~control[rows == 0]).sum() / (~control).sum()
    assert 0.35 < share < 0.65, "of two kinds of hot inputs, about half each"


def test_the_control_depends_on_seed_and_batch_alone() -> None:
    assert np.array_equal(kept(5), kept(5))
    assert not np.array_equal(kept(5), kept(6))
    assert not np.array_equal(kept(5, 9), kept(5, 10))
    hot = np.ones(10, bool)
    assert at_random(hot, hot, 1, 1).all()


def test_a_batch_keeps_a_multiple_of_the_step() -> None:
    stale, filled, control = ~kept(None), ~kept(None, step=60), ~kept(5, step=60)
    assert (~stale).sum() == 267
    assert (~filled).sum() == (~control).sum() == 300
    assert np.array_equal(filled, stale & (np.cumsum(stale) > 33)), "the first stale inputs fill up the step"


@pytest.mark.parametrize(
    ("stale", "size", "step", "left_out"),
    [(6, 10, 4, 6), (5, 10, 4, 2), (1, 10, 4, 0), (3, 5, 8, 0), (0, 8, 4, 0)],
)
def test_no_input_is_left_out_where_a_step_is_not_reached(
    stale: int, size: int, step: int, left_out: int
) -> None:
    assert in_steps(np.arange(size) < stale, step).sum() == left_out


@pytest.mark.parametrize("knobs", [{"control": "none"}, {"control": "random", "freeze_stale_rows": True}])
def test_a_control_that_makes_no_sense(knobs: dict[str, object]) -> None:
    with pytest.raises(PluginError, match="plugins.slipstream.control="):
        Slipstream(**defaults("slipstream") | knobs)
