"""Requests of a small package that is not there."""

from __future__ import annotations

from typing import Any

import numpy as np
from recpipe_serve import Asked
from recpipe_serve.http.features import Features

MANIFEST: dict[str, Any] = {
    "dense": {"names": ["age", "hour"]},
    "sparse": [{"name": "user", "rows": 1000}, {"name": "seen", "rows": 100}, {"name": "item", "rows": 100}],
    "outputs": [{"name": "click", "kind": "clicks"}],
}
FEATURES = Features(MANIFEST, 64)


def request(
    user: int = 1,
    seen: tuple[int, ...] = (1, 2, 3),
    age: float = 30.0,
    hour: float = 12.0,
    items: tuple[int, ...] = (5, 6),
) -> Asked:
    """One user beside some items."""
    return FEATURES.asked(
        {
            "dense": np.array([[age, hour]], np.float32),
            "user": np.array([user]),
            "seen": np.array(seen, np.int64),
            "seen.lengths": np.array([len(seen)]),
            "item": np.array(items),
        }
    )
