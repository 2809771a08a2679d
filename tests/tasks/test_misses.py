"""task=misses: what it leaves and says, that runs miss as it tells, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.report import missed
from recpipe.run import run
from tests.one_epoch import RECIPE


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("misses")
    found = run(compose([*RECIPE, "task=misses", "tiers.resident_bytes=30%"]), folder)
    assert json.loads((folder / "misses.json").read_text()) == found
    assert "<svg" in (folder / "misses.html").read_text()
    assert not (folder / "checkpoints").exists()
    return found


@pytest.mark.parametrize(
    ("policy", "share"),
    [
        ("lru", "10%"),
        # The policies themselves are compared with plain ones in ``tests/tables``.
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in (("lru", "30%"), ("lfu", "10%"), ("lfu", "30%"))
        ),
    ],
)
def test_runs_miss_as_told(policy: str, share: str, told: dict[str, Any], tmp_path: Path) -> None:
    words = [f"tiers.policy={policy}", f"tiers.resident_bytes={share}", "task.page=false"]
    report = run(compose([*RECIPE, *words]), tmp_path)
    looked_up, hits = (sum(report["series"][name]) for name in ("lookups", "hits"))
    at = min(
        range(len(told["shares"])), key=lambda n: abs(told["shares"][n] - float(share.rstrip("%")) / 100)
    )
    assert told[policy]["missed"][at] == pytest.approx(1 - hits / looked_up, abs=0.02)
    fetched = report["io"]["rows_read"] / told["batches"]
    assert told[policy]["fetched"][at] == pytest.approx(fetched, rel=0.05)


def test_the_tables_are_told_apart(told: dict[str, Any]) -> None:
    assert 1 < len(told["tables"]) <= 8
    assert sum(table["rows"] for table in told["tables"]) <= told["rows"]
    assert sum(table["lookups"] for table in told["tables"]) < told["lookups"]
    for table in told["tables"]:
        falling = table["lfu"]["missed"]
        assert falling == sorted(falling, reverse=True)
        assert falling[0] > falling[-1] > 0


def test_what_it_says(told: dict[str, Any]) -> None:
    at = told["shares"].index(told["budget"]["share"])
    of, own, *_ = missed.sentences(told)
    assert f"{told['batches']} batches of 64 samples" in of
    assert f"lfu misses {100 * told['lfu']['missed'][at]:.2f}%" in own


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"needs at least 2 batches of data.batch_size=100000, and there are 1"
    ):
        run(compose([*RECIPE, "task=misses", "data.batch_size=100000"]), tmp_path)
