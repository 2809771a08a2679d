"""``recpipe serve``'s ``tune``: what is measured once, written beside the package, and read again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.request import urlopen

import pytest
from recpipe_deeprecsys import tune
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.engine import Batching
from recpipe_deeprecsys.tests.here import small_package
from recpipe_deeprecsys.tune import tuned, wanted_of
from recpipe_serve.command import tuned as of_server
from recpipe_serve.config import ServeConfig

from recpipe.errors import UserError

FOUND = {"workers": 2, "threads": 1, "batch": 64, "wait_ms": 1.5}


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


@contextmanager
def serving(package: Path, log: Path, *words: str) -> Iterator[str]:
    """``recpipe serve`` in a process of its own; yields its address."""
    command = [sys.executable, "-m", "recpipe", "serve", str(package), "port=0", "workers=2", *words]
    with log.open("wb") as lines, subprocess.Popen(command, stdout=lines, stderr=lines) as process:
        try:
            until = monotonic() + 1500
            while (found := re.search(r"at (http://\S+?);", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                assert monotonic() < until, log.read_text()
                sleep(0.1)
            yield found[1]
        finally:
            process.terminate()


@pytest.mark.soak  # minutes: a server is started for each batching that is tried
def test_a_server_tunes_itself_and_takes_it_when_it_starts_again(tmp_path: Path) -> None:
    pytest.importorskip("mlperf_loadgen", reason="the search needs the extra recpipe[loadgen]")
    made = small_package(tmp_path)
    tuned_to, log = made.with_name("rmc.recpipe.tuned.json"), tmp_path / "serve.log"
    with serving(made, log, "tune=p90<250ms") as address:
        assert urlopen(f"{address}/ready").status == 200
        said = json.loads(tuned_to.read_text())
        assert f"wrote {tuned_to}" in log.read_text().replace("\n", "")
        best = said["report"]["best"]
        assert best["valid"]
        assert best["latency_ms"]["90"] <= 250
        assert said["words"] == {name: said["report"]["batching"][name] for name in said["words"]}
        searched = [one["batching"] for one in said["report"]["search"]]
        assert {one["workers"] for one in searched} == {1, 2}
    written = tuned_to.stat().st_mtime_ns
    with serving(made, log, "tune=p90<250ms") as address:
        assert urlopen(f"{address}/ready").status == 200
        assert "p90<250ms as" in log.read_text()
        assert tuned_to.stat().st_mtime_ns == written
    refused = subprocess.run(
        [sys.executable, "-m", "recpipe", "serve", str(made), "port=0", "tune=p90<0.01ms"],
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    line = refused.stderr.splitlines()[-1]
    assert line.startswith("error: tune=p90<0.01ms: bound_ms=0.01: a request that comes alone takes")
