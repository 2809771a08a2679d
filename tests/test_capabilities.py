"""The page of capabilities: each of its commands runs, and one that is wrong does not."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recpipe import cli
from recpipe.config.compose import conf_dir

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \|(?: [^|]+ \|){3} (.+) \|$", PAGE, re.MULTILINE)
COMMANDS = {what: found[1] for what, cell in ROWS if (found := re.fullmatch(r"`recpipe (.+)`", cell))}
DATA = "data=files data.path=clicks.parquet data.features=features.yaml"
DEFAULT = ("DIN", "PLE", "FTRL of tables", "crosses", "AUC, logloss")
FINISHED = ("evaluate", "predict", "package", "quantize", "index", "schema")


def ran(command: str, *words: str) -> int:
    """The exit status of a command, in this process."""
    arguments = [*shlex.split(command.replace("...", DATA)), *words]
    if arguments[0] not in FINISHED:
        arguments += ["data.batch_size=32", "trainer.progress=false", "trainer.backend=plain"]
    return cli._guarded(arguments)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page names."""
    made, rng, count = tmp_path_factory.mktemp("capabilities"), np.random.default_rng(1), 400
    lengths = rng.integers(1, 6, count)
    columns = {
        "click": rng.integers(0, 2, count),
        "buy": rng.integers(0, 2, count),
        "seconds": rng.integers(0, 9, count),
        "trust": rng.random(count),
        "day": np.arange(count),
        "user": rng.integers(1, 40, count),
        "item": rng.integers(1, 30, count),
        "category": rng.integers(1, 9, count),
        "items": [rng.integers(1, 30, n).tolist() for n in lengths],
        "categories": [rng.integers(1, 9, n).tolist() for n in lengths],
        "tags": [rng.integers(1, 9, 2).tolist() for _ in lengths],
        "price": rng.random(count) * 2,
    }
    table = pa.table(columns)
    (made / "incoming").mkdir()
    for file in ("clicks.parquet", "incoming/clicks.parquet"):
        pq.write_table(table, made / file)
    plain = table.select(["click", "user", "item", "price"])
    pyarrow.csv.write_csv(plain, made / "plain.csv")
    (made / "plain.jsonl").write_text("\n".join(map(json.dumps, plain.to_pylist())))
    (features,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (made / "features.yaml").write_text(features)
    tasks = features.replace("[click]", "[click, buy]").replace("[buy, ", "[")
    (made / "tasks.yaml").write_text(tasks)
    values = features.replace("[click]", "[{name: seconds, kind: values}]").replace(
        "seconds, trust", "click, trust"
    )
    (made / "values.yaml").write_text(values)
    return made


def trained(name: str, *words: str) -> None:
    """A run in the folder ``name``, once."""
    if not Path(name).exists():
        assert ran("...", f"hydra.run.dir={name}", "trainer.max_steps=4", *words) == 0


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.soak] * (what not in DEFAULT)) for what in COMMANDS]
)
def test_its_command_runs(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(folder)
    command = COMMANDS[what]
    if re.search(r"\brun\b", command):
        trained("run")
    if "towers" in command:
        pytest.importorskip("faiss")
        negatives = "data.negatives={feature: item, sampling: in_batch}"
        trained("towers", "model=two_tower", "model.candidate=[item]", negatives)
    finished = command.split()[0] in FINISHED
    words = (
        () if finished or "task=" in command or "data=stream" in command else ("trainer.fast_dev_run=true",)
    )
    assert ran(command, *words) == 0, capsys.readouterr().err


def test_a_wrong_command_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert ran(COMMANDS["focal"].replace("focal", "focel"), "trainer.fast_dev_run=true") == 2
    assert ran(COMMANDS["DIN"].replace("features.yaml", "feature.yaml").replace("din", "dim")) == 2


def test_every_model_has_a_row() -> None:
    told = " ".join(COMMANDS.values()).split()
    files = [*conf_dir().glob("model/*.yaml"), *ROOT.glob("plugins/*/conf/model/*.yaml")]
    assert {f"model={file.stem}" for file in files} - {"model=custom"} <= {*told}


def test_every_row_has_a_command_or_says_no() -> None:
    cells = [cell for what, cell in ROWS if what not in ("capability", "---")]
    assert len(cells) > 70
    for cell in cells:
        assert re.fullmatch(r"`recpipe .+`|\*\*no\*\*|\[.+\]\(guide/\w+\.md\)", cell), cell
