"""``recpipe serve``'s ``tune``: what is measured once, written beside the package, and read again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from recpipe_deeprecsys import tune
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.engine import Batching
from recpipe_deeprecsys.tune import tuned, wanted_of
from recpipe_serve.command import tuned as of_server
from recpipe_serve.config import ServeConfig

from recpipe.errors import UserError

FOUND = {"workers": 2, "batch": 64, "wait_ms": 1.5}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """What has the digest of a package."""
    made = tmp_path / "m.recpipe"
    made.mkdir()
    (made / "manifest.sha256").write_text("one")
    return made


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """The options of each search, which finds ``FOUND``."""
    asked: list[BenchOptions] = []

    def measure(package: Path, options: BenchOptions, rows: object, directory: Path) -> dict[str, Any]:
        asked.append(options)
        batching = asdict(Batching(64, 1.5, True, 2))
        return {"best": {"rate": 100.0}, "batching": batching, "why": None}

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "require_loadgen", lambda: None)
    return asked


def test_a_server_takes_what_the_search_found(package: Path, measured: list[BenchOptions]) -> None:
    config = of_server(package, "p99<40ms", ServeConfig(queue=9))
    assert config == replace(ServeConfig(queue=9), **FOUND)  # type: ignore[arg-type]
    (asked,) = measured
    assert (asked.percentile, asked.bound_ms, asked.search, asked.http) == (99, 40, True, True)
    said = json.loads(package.with_name("m.recpipe.tuned.json").read_text())
    assert said["words"] == FOUND
    assert said["requests_per_second"] == 100.0


def test_it_is_measured_again_for_another_package_or_bound_alone(
    package: Path, measured: list[BenchOptions]
) -> None:
    for _ in range(2):
        assert tuned(package, "p95<25ms", 1, 1) == FOUND
    assert len(measured) == 1
    tuned(package, "p95<30ms", 1, 1)
    assert len(measured) == 2
    (package / "manifest.sha256").write_text("other")
    tuned(package, "p95<30ms", 1, 1)
    assert len(measured) == 3
    package.with_name("m.recpipe.tuned.json").write_text("{")
    assert tuned(package, "p95<30ms", 1, 1) == FOUND
    assert len(measured) == 4


def test_no_rate_within_the_bound_is_said(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "require_loadgen", lambda: None)
    monkeypatch.setattr(tune, "measure", lambda *_: {"best": None, "why": "bound_ms=1: too small"})
    with pytest.raises(UserError, match="tune=p95<1ms: bound_ms=1: too small"):
        tuned(package, "p95<1ms", 1, 1)


@pytest.mark.parametrize("wanted", ["25ms", "p95<25", "p80<25ms", "p95<0ms", "p95>25ms", "p95<-1ms"])
def test_a_bound_that_is_none_is_one_line(wanted: str) -> None:
    with pytest.raises(UserError, match="say a percentile and a bound, as in"):
        wanted_of(wanted, 1, 1)


def test_workers_are_the_most_that_are_tried() -> None:
    assert wanted_of("p99.9<7.5ms", 3, 2).workers == 3
    assert wanted_of("p95<25ms", 1, 1).workers >= 1


def test_what_is_no_package_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make a package with"):
        tuned(tmp_path / "none", "p95<25ms", 1, 1)
