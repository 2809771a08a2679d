"""Hotline from the shared popularity profile: the first choice is informed, and training stays exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recpipe_hotline.plugin import Hotline
from recpipe_hotline.tests.rig import ROOM, default_knobs

from recpipe.access.counts import SAMPLE, load_profile, table_bases
from recpipe.plugin.policy import RowSpace
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.testing import SMALL, train
from tests.placing import context_of


@pytest.mark.parametrize("profile", [False, True])
def test_counts_start_from_the_profile_when_asked_to(profile: bool, synthetic: Any, tmp_path: Path) -> None:
    tables = TableSet.one_each(synthetic.schema.sparse, 8, TableOptimizer("rowwise_adagrad", 0.1), 1)
    ctx = context_of(
        tables,
        1000,
        synthetic,
        batch_size=256,
        epoch_samples=synthetic.size("train"),
        cache_dir=tmp_path,
        batches=lambda first: synthetic.batches("train", 256, first),
    )
    bases = table_bases(ctx)
    claim = Hotline(**(default_knobs() | {"profile": profile})).contribute(ctx).cache[0]
    counts: Any = getattr(claim.policy(RowSpace(bases, 1000)), "counts")  # noqa: B009
    expected = load_profile(ctx, SAMPLE).dense(int(bases[-1]))
    assert expected.sum() > 0
    assert np.array_equal(counts, expected if profile else np.zeros_like(expected))


def test_an_informed_start_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the run in which every row passes through the cold tier, while other rows are chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    overrides = (*SMALL, *ROOM, "trainer.progress=false")
    informed = train((*overrides, "+plugin=hotline", "plugins.hotline.profile=true"), tmp_path / "informed")
    without = train((*overrides, "tiers.policy=nocache"), tmp_path / "without")
    assert informed.parameters.keys() == without.parameters.keys()
    for name, value in without.parameters.items():
        np.testing.assert_allclose(informed.parameters[name], value, rtol=0, atol=1e-5, err_msg=name)
    uninformed = train((*overrides, "+plugin=hotline"), tmp_path / "uninformed")
    ours, theirs = (r.report["plugins"]["hotline"] for r in (informed, uninformed))
    assert ours["split_batch_share"] > 0.3
    assert ours["popular_lookup_share"] != theirs["popular_lookup_share"], "the profile has changed nothing"
