"""Versions of cuts, as models of the open inference protocol have them: whole numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from recpipe.answers.delta import Version

DIGESTS = 10**10
"""So many are told apart."""


def digest_of(plan: Mapping[str, Any]) -> str:
    """That of a plan, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def version_of(version: Version, plan: str) -> str:
    """That of the cut by the plan with this digest of a package of this ``version``: a whole number, as
    Triton has them, which grows with the deltas in it. Parts of two cuts never answer together."""
    told = int(hashlib.sha256(f"{version.digest} {plan}".encode()).hexdigest(), 16)
    return str(version.sequence * DIGESTS + told % DIGESTS)


def sequence_of(version: str) -> int:
    """The number of the latest delta in a cut of this ``version``."""
    return int(version) // DIGESTS
