"""The short comparison at the end of a run: what it trains, when, and what it says."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.run import carry_out, run
from recpipe.tasks.beside import beside, policies_beside, print_beside, reason
from recpipe.testing import SMALL

RUN = [*SMALL, "trainer.progress=false", "tiers.resident_bytes=30%", "task.beside_steps=5"]
HOTLINE = [*RUN, "+plugin=hotline"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(compose(HOTLINE), tmp_path_factory.mktemp("run"))


def asked(report: dict[str, Any], *words: str) -> list[str]:
    """The rows beside the run, if its recipe were of these words."""
    return list(policies_beside(report | {"recipe": Recipe.of(compose(list(words))).values}))


def test_the_embedded_data_under_a_caching_plugin_is_compared(report) -> None:
    assert asked(report, *HOTLINE) == ["nocache", "lru"]
    assert asked(report, *HOTLINE, "task.beside=[lfu]") == ["lfu"]
    assert asked(report, *HOTLINE, "task.beside=null") == []
    assert asked(report, *HOTLINE, "resume=somewhere") == []


def test_other_data_only_if_asked(report) -> None:
    parquet = ("data=parquet", "data.path=x", "data.label=y", "data.sparse=[a]", "data.table_rows=3")
    for words, rows in (((), []), (("task.beside=[lru]",), ["lru"])):
        assert asked(report, *parquet, "+plugin=hotline", *words) == rows


def test_a_run_whose_cache_is_no_plugins_is_not(report) -> None:
    assert asked(report, *RUN) == []


def test_rows_are_the_first_steps_under_each(tmp_path: Path) -> None:
    rows = beside(compose(HOTLINE), ["nocache", "lru"], tmp_path, carry_out)
    assert [row["name"] for row in rows] == ["nocache", "lru", "hotline"]
    nocache, lru, hotline = (row["io"]["rows_read"] for row in rows)
    assert nocache > lru > 0
    assert nocache > hotline > 0
    assert all(row["samples_per_second"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def row(name: str, speed: float, mib: int, waited: float) -> dict[str, Any]:
    io = {"rows_read": 1, "rows_written": 1, "bytes_read": mib << 19, "bytes_written": mib << 19}
    return {"name": name, "samples_per_second": speed, "io": {**io, "wait_seconds": waited}}


def test_it_says_what_was_gained_and_lost() -> None:
    rows = [row("nocache", 100.0, 400, 9.0), row("lru", 240.0, 90, 1.5), row("hotline", 200.0, 80, 1.0)]
    text = reason(rows)
    assert (
        "hotline is 2.00 times as fast as nocache: it moves 80 MiB and not 400 MiB, and waits 1.00 s" in text
    )
    assert "0.83 times as fast as lru" in text
    console = Console(width=80, record=True, file=StringIO())
    print_beside(rows, 5, console)
    assert "first 5 steps" in console.export_text()
