"""Which ids lose their rows by a function of another package: its entry point in the group
``recpipe.evictions``, or ``module:function``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.calls import Origin, blaming
from recpipe.plugin.errors import PluginError, PluginLoadError
from recpipe.plugin.offers import BESIDE, EVICTION, entry, imported, offered, origin_of
from recpipe.plugin.tables import EVICTIONS

Scores = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int], NDArray[np.integer]]
"""From the key of each row of an id int64 [n], how often that was seen and in which batch last, int64 [n]
each, and the number of this batch: a number for each row, int or float [n]. Rows with the lowest numbers go
first, of equal ones the lower row; none of an id of this batch goes. It depends on what it is given alone,
since batches are planned ahead and on every rank."""


@dataclass(frozen=True)
class Policy:
    """``scores`` of the package ``origin``, checked."""

    origin: Origin
    scores: Scores

    def __call__(
        self, keys: NDArray[np.int64], times: NDArray[np.int64], seen: NDArray[np.int64], now: int
    ) -> NDArray[np.integer]:
        """See ``Scores``."""
        with blaming(self.origin, "eviction"):
            found = np.asarray(self.scores(keys, times, seen, now))
        if found.shape != keys.shape or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
            raise PluginError(
                f"plugin {self.origin}, part eviction, gives {found.dtype} {list(found.shape)}, not a finite "
                f"number for each of {len(keys):,} rows"
            )
        return found


def policy_of(name: str) -> Policy | None:
    """The policy ``name``; None for one of recpipe's own. ``PluginError`` if nothing installed has it."""
    if name in EVICTIONS:
        return None
    if ":" in name:
        found = EntryPoint(name.rpartition(":")[2], name, BESIDE[EVICTION])
    else:
        found = entry(EVICTION, name, offered(EVICTION))
    scores = imported(EVICTION, found)
    if not callable(scores):
        raise PluginLoadError(f"eviction policy {origin_of(found)}: '{found.value}' is no function")
    return Policy(origin_of(found), scores)
