"""Long work on tables and checkpoints shows how far it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest

from recpipe.common import meter
from recpipe.config.compose import compose
from recpipe.run import run

RECIPE = (
    "data.samples=1500",
    "data.batch_size=128",
    "data.tables={a: 70000, b: 801}",
    "model.embedding_dim=8",
    "model.bottom=[8]",
    "model.top=[8]",
    "tiers.policy=lru",
    "tiers.resident_bytes=10%",
    "trainer.progress=false",
    "trainer.logger=null",
)


FILLED = {
    "ssd": (("tiers.store=ssd",), "filling the cold tier's rows"),
    "host": (("tiers.store=host",), "filling the cold tier's rows"),
    "resident": (("tiers.policy=resident",), "filling the tables' rows"),
    "shards": (("tiers.policy=resident", "tiers.sharded=true"), "filling the tables' rows"),
}
"""How tables are made, and what is shown of it."""


@pytest.mark.parametrize("kind", FILLED)
def test_filling_saving_and_loading_tables_are_shown(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meter, "LINE_SECONDS", 0.0)
    more, filling = FILLED[kind]
    words = [*RECIPE, *more]

    def shown() -> dict[str, list[tuple[int, int]]]:
        """What is done, and of how much, by what is being done."""
        found: dict[str, list[tuple[int, int]]] = {}
        for record in caplog.records:
            line = re.fullmatch(r"(.*)  ([\d,]+)/([\d,]+)(  waiting .*)?(  .* left)?", record.getMessage())
            if line is not None:
                done, whole = (int(line[at].replace(",", "")) for at in (2, 3))
                found.setdefault(line[1], []).append((done, whole))
        caplog.clear()
        return found

    with caplog.at_level("INFO"):
        run(compose([*words, "trainer.max_steps=4"]), tmp_path / "first")
        first = shown()
        resume = f"resume={tmp_path / 'first' / 'checkpoints'}"
        run(compose([*words, "trainer.max_steps=6", resume]), tmp_path / "second")
        second = shown()
    for doing in (filling, "writing rows to the checkpoint"):
        assert len(first[doing]) > 1
        assert first[doing][-1] == (70801, 70801)
    rows = 70801
    assert (
        first["sealing the checkpoint's bytes"][-1][0] == first["sealing the checkpoint's bytes"][-1][1] > 0
    )
    if kind == "shards":  # weights and state, which the library reads
        filling, rows = "loading rows", 2 * 70801
    assert second[filling][-1] == (rows, rows)
    assert (
        second["checking the checkpoint's bytes"][-1][0] == second["checking the checkpoint's bytes"][-1][1]
    )


class AtItsEnd(Event):
    """Lets the thread of a block look once, before the block is left."""

    looked = False

    def wait(self, timeout: float | None = None) -> bool:
        super().wait()
        looked, self.looked = self.looked, True
        return looked


@pytest.mark.parametrize(
    "words", [("tiers.policy=lru",), ("tiers.policy=resident", "tiers.sharded=true")], ids=["tiers", "shards"]
)
def test_each_part_of_a_run_is_shown_if_it_takes_long(
    tmp_path: Path, words: Sequence[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here each takes longer than the time after which something is shown."""
    monkeypatch.setattr(meter, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(meter, "Event", AtItsEnd)
    recipe = [*RECIPE, "trainer.max_steps=2", "data.tables={a: 70, b: 801}", *words]

    def shown() -> set[str]:
        found = {record.getMessage().partition("  ")[0] for record in caplog.records}
        caplog.clear()
        return found

    with caplog.at_level("INFO"):
        run(compose(recipe), tmp_path / "first")
        first = shown()
        run(compose([*recipe, "trainer.max_steps=3", f"resume={tmp_path / 'first'}"]), tmp_path / "second")
        second = shown()
    of_both = {
        "making the model",
        "planning",
        "building the tables",
        "writing the checkpoint",
        "sealing the checkpoint's bytes",
        "writing rows back",
        "writing the report",
        "closing the tables",
    }
    if "tiers.sharded=true" in words:
        of_both.add("planning the shards")
    assert first >= of_both
    assert second >= of_both | {"opening the checkpoint", "loading the checkpoint"}
