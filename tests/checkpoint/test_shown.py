"""Long work on tables and checkpoints shows how far it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recpipe.common import console
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


@pytest.mark.parametrize("store", ["ssd", "host"])
def test_filling_saving_and_loading_tables_are_shown(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    words = [*RECIPE, f"tiers.store={store}"]

    def shown() -> dict[str, list[tuple[int, int]]]:
        """What is done, and of how much, by what is being done."""
        found: dict[str, list[tuple[int, int]]] = {}
        for record in caplog.records:
            line = re.fullmatch(r"(.*)  ([\d,]+)/([\d,]+)(  .* left)?", record.getMessage())
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
    rows = ["filling the cold tier's rows", "writing rows to the checkpoint"]
    for doing in rows:
        assert len(first[doing]) > 1
        assert first[doing][-1] == (70801, 70801)
    assert (
        first["sealing the checkpoint's bytes"][-1][0] == first["sealing the checkpoint's bytes"][-1][1] > 0
    )
    assert second["filling the cold tier's rows"][-1] == (70801, 70801)
    assert (
        second["checking the checkpoint's bytes"][-1][0] == second["checking the checkpoint's bytes"][-1][1]
    )
