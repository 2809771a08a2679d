"""benchmarks/latency_bounded.py over simulated targets: sides in turn, those without a valid rate, tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from recpipe_deeprecsys.config import PERCENTILES, BenchOptions
from recpipe_deeprecsys.engine import Batching
from recpipe_deeprecsys.load import SERVER, Outcome

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SMALL, LARGE, SLOW = Batching(25), Batching(512), Batching(7)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("latency_bounded")


class Setup:
    """Whose target is its batching."""

    def use(self, batching: Batching) -> Any:
        return batching


@dataclass
class Loaded:
    """``LARGE`` answers three times the requests of ``SMALL``; one alone is late in ``SLOW``."""

    bound_ms = 25.0
    percentile = "95"

    def run(self, target: Batching, scenario: str, rate: float | None = None) -> Outcome:
        most = {SMALL: 100.0, LARGE: 300.0, SLOW: 50.0}[target]
        latency = dict.fromkeys(PERCENTILES, 30.0 if target == SLOW else 5.0)
        if scenario != SERVER or rate is None:
            return Outcome(scenario, True, None, most, 0.0, latency)
        return Outcome(scenario, rate <= most, rate, rate, rate, latency)


def test_a_side_without_a_valid_rate_is_told_with_the_reason_and_the_others_go_on(
    script: Any, tmp_path: Path
) -> None:
    one = script.Loaded(Setup(), Loaded(), BenchOptions(workers=2, tolerance=0.05), [(0, 164)])
    work = script.Work(tmp_path, 2, 0.1, 1.0, 100)
    sides = {script.STATIC_PARTS: SMALL, script.CUT: SLOW, script.SEARCHED: LARGE}
    found = work.in_turn({name: (one, batching) for name, batching in sides.items()})
    assert found["ratios"][script.STATIC_PARTS] == pytest.approx([3.0, 3.0], rel=0.1)
    assert found["ratios"][script.CUT] == []
    assert list(found["why"]) == [script.CUT]
    about = {
        "date": "2026-01-01",
        "scale": 0.1,
        "environment": {"cores": 2, "cpu": "x", "commit": "0" * 40},
    }
    model = {**found, "batchings": {name: asdict(batching) for name, batching in sides.items()}}
    (tmp_path / "batching.json").write_text(json.dumps({**about, "models": {"rmc1": model}}))
    script.write_tables(tmp_path, tmp_path)
    rows = json.loads((tmp_path / "latency_bounded.json").read_text())["rows"]
    assert [row[0] for row in rows] == ["RMC1", "RMC1"]
    assert rows[0][5][0] == pytest.approx(3.0, rel=0.1)
    assert rows[1][2] == "none is valid"
    assert rows[1][5] == "bound_ms=25: a request that comes alone takes 30 ms at p95 already"
