"""Requests cut down to some of their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recpipe_serve.batching.forms import Asked
from recpipe_serve.http.features import Features

MANIFEST: dict[str, Any] = {
    "dense": {"names": ["x", "y"]},
    "sparse": [{"name": name, "rows": 100, "weights": "given"} for name in "abcd"],
    "lookups": [{"weighted": True}],
}


def asked(dense_rows: int) -> Asked:
    """Five samples: ``a`` and ``b`` are shared, ``c`` has two ids of each, ``d`` none to three."""
    draw, inputs = np.random.default_rng(dense_rows), dict[str, Any]()
    inputs["dense"] = draw.normal(size=(dense_rows, 2)).astype(np.float32)
    inputs |= {"a": draw.integers(0, 100, 1), "b": draw.integers(0, 100, (1, 3))}
    inputs |= {"c": draw.integers(0, 100, (5, 2)), "d": draw.integers(0, 100, 7)}
    inputs["d.lengths"] = np.array([2, 0, 3, 1, 1])
    inputs |= {f"{name}.weights": draw.random(inputs[name].shape).astype(np.float32) for name in "abcd"}
    found = Features(MANIFEST, 8).asked(inputs)
    found.rows, found.keys = [{"n": n} for n in range(5)], found.ids + 1000
    return found


def of_sample(one: Asked, place: int) -> list[Any]:
    """All that a sample has."""
    found: list[Any] = [one.dense[place].tolist(), one.rows[place]]
    for feature in range(4):
        for keyed in (False, True):
            bags = one.bags(feature, True, keyed)
            lengths = np.broadcast_to(np.asarray(bags.lengths), one.samples)
            own = slice(int(lengths[:place].sum()), int(lengths[: place + 1].sum()))
            assert bags.weights is not None
            found.append((bags.ids[own].tolist(), bags.weights[own].tolist()))
    return found


@pytest.mark.parametrize("dense_rows", [1, 5])
@pytest.mark.parametrize("places", [[1], [4], [0, 2], [1, 2, 3], [0, 1, 2, 3, 4]])
def test_a_part_has_what_its_samples_have(dense_rows: int, places: list[int]) -> None:
    whole = asked(dense_rows)
    for _ in range(2):  # the second time some forms are known
        part = whole.part(np.array(places))
        assert part.samples == len(places)
        assert [of_sample(part, n) for n in range(len(places))] == [of_sample(whole, n) for n in places]
