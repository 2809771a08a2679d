"""The walks on docs/house.md: one batch, stop by stop, as a run goes."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import recpipe.run
from recpipe.config.compose import compose

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
STOP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`: \S.*\.$", re.MULTILINE)
WALKS = {
    "All rows in memory": ["trainer.backend=plain"],
    "Rows on the SSD, under hotline": [
        "+plugin=hotline",
        "trainer.backend=plain",
        "trainer.split=always",
        "plugins.hotline.min_micro_batch=8",
        "tiers.resident_bytes=70%",
    ],
}
"""By heading, the overrides of the run that walks it."""
MOST = 25


def stops(heading: str) -> list[tuple[str, str]]:
    """The files and functions under a heading of the page."""
    section = PAGE.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return STOP.findall(section)


@contextmanager
def watching(called: set[tuple[str, str]]) -> Iterator[None]:
    """Adds every function of the project that any thread calls in the block."""

    def seen(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            called.add((code.co_filename, code.co_qualname))

    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("heading", WALKS)
def test_a_run_goes_by_every_stop(heading: str, tmp_path: Path) -> None:
    walk = stops(heading)
    assert 15 <= len(walk) <= MOST
    called: set[tuple[str, str]] = set()
    small = [
        "data.samples=5000",
        "data.batch_size=128",
        "data.table_scale=0.01",
        "trainer.max_steps=24",
        "trainer.logger=null",
        "trainer.progress=false",
        "task.page=false",
    ]
    with watching(called):
        recpipe.run.run(compose([*small, *WALKS[heading]]), tmp_path)
    missed = [stop for stop in walk if (str(ROOT / stop[0]), stop[1]) not in called]
    assert not missed


def test_each_line_of_a_walk_is_a_stop() -> None:
    for heading in WALKS:
        section = PAGE.partition(f"### {heading}\n")[2].partition("\n#")[0]
        lines = [line for line in section.splitlines() if re.match(r"\d+\.", line)]
        assert len(lines) == len(stops(heading))
        assert [int(line.partition(".")[0]) for line in lines] == list(range(1, len(lines) + 1))
