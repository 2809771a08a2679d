"""Hotline from the shared popularity profile: the first choice is informed, and training stays exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recpipe_hotline.plugin import Hotline
from recpipe_hotline.tests.rig import default_knobs

from recpipe.embedding.policies import RowSpace
from recpipe.embedding.profile import SAMPLE, load_profile, table_bases
from recpipe.plugin.api import Context, TableInfo


@pytest.mark.parametrize("profile", [False, True])
def test_counts_start_from_the_profile_when_asked_to(profile: bool, synthetic: Any, tmp_path: Path) -> None:
    ctx = Context(
        tables={f.name: TableInfo(f.name, f.rows, 8) for f in synthetic.schema.sparse},
        device="cpu",
        batch_size=256,
        resident_bytes=36_000,
        record_bytes=36,
        seed=1,
        data_fingerprint=synthetic.fingerprint,
        steps=1,
        epoch_samples=synthetic.size("train"),
        cache_dir=tmp_path,
        batches=lambda first: synthetic.batches("train", 256, first),
    )
    bases = table_bases(ctx)
    claim = Hotline(**(default_knobs() | {"profile": profile})).contribute(ctx).tables[0]
    counts = vars(claim.policy.cache(RowSpace(bases, 1000)))["counts"]
    expected = load_profile(ctx, SAMPLE).dense(int(bases[-1]))
    assert expected.sum() > 0
    assert np.array_equal(counts, expected if profile else np.zeros_like(expected))
