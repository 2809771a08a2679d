"""The half hour of docs/first_run.md with a file that nobody has described, command by command."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from recpipe.commands import command
from recpipe.config.compose import compose
from recpipe.data.proposal.leaks import auc
from recpipe.run import run
from tests.pages import DOCS

QUICK = ("trainer.backend=plain", "task.page=false", "trainer.progress=false", "trainer.logger=null")
"""What saves a test's time and changes no sample."""


def section() -> str:
    page = (DOCS / "first_run.md").read_text(encoding="utf-8")
    return page.partition("## Half an hour with a file of your own\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section(), re.MULTILINE | re.DOTALL)


def carry_out(line: str, folder: Path) -> None:
    """One command of the page, in this process."""
    words = shlex.split(line.removeprefix("python -m recpipe "))
    if "=" not in words[0]:
        assert command(words[0]).run(words[0], words[1:]) == 0
        return
    asked = [word for word in words if not word.startswith("hydra.run.dir=")]
    directory = next((word.partition("=")[2] for word in words if word not in asked), "outputs/auto")
    run(compose([*asked, *QUICK, f"data.cache_dir={folder}/cache"]), folder / directory)


def test_the_commands_of_the_page_do_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (code,), (shown,) = blocks("python"), blocks("text")
    exec(code, {})
    look, train, evaluate, predict, in_a_hurry = (block.strip() for block in blocks("sh"))
    carry_out(look, tmp_path)
    said = capsys.readouterr().out
    for line in shown.splitlines():
        assert line.rstrip() in said, line
    carry_out(train, tmp_path)
    carry_out(evaluate, tmp_path)
    carry_out(predict, tmp_path)
    (evaluation,) = tmp_path.glob("outputs/*/*/evaluation.json")
    with Path("later.csv").open() as asked, Path("scores.csv").open() as answered:
        rows, scores = list(csv.DictReader(asked)), list(csv.DictReader(answered))
    assert [(row["user"], row["sku"]) for row in rows] == [(row["user"], row["sku"]) for row in scores]
    found = auc(
        np.array([float(score["score"]) for score in scores]), np.array([r["bought"] == "1" for r in rows])
    )
    told = json.loads(evaluation.read_text())["tasks"]["score"]["figures"]["auc"]["value"]
    assert found == pytest.approx(told, abs=1e-5)
    assert found is not None
    assert found > 0.9
    carry_out(in_a_hurry, tmp_path)
    stated, chosen = Path("features.yaml").read_text(), Path("outputs/auto/features.yaml").read_text()
    assert stated.partition("labels:")[2] == chosen.partition("labels:")[2]
