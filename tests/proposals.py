"""TorchRec's planner tries all combinations of the ways to shard a model's tables if there are up to 10,000.

That takes a second of a core. In tests it does so up to 64; beyond, it proposes plans one after another, as
for models of more tables. No plan changes what is trained.
"""

from __future__ import annotations

import pytest
from torchrec.distributed.planner.proposers import GridSearchProposer

MOST = 64


def propose_few(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` ends."""
    patch.setattr(GridSearchProposer.__init__, "__defaults__", (MOST,))
