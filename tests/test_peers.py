"""The benchmark against peers: its figures, its rows, what it says of an absent peer; the same losses."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.config.compose import compose
from tests.processes import ROOT

PEERS = ROOT / "benchmarks" / "peers"
MODULES = ("work", "machine", "roster", "rounds", "compare", "__main__")
SAY = "import json; print('before'); print(json.dumps({{'samples_per_second': {}}})); print('after')"


@pytest.fixture
def peers() -> Any:
    """The benchmark's modules, which import each other by bare names as scripts of one folder do."""
    names = [name for name in MODULES if name != "__main__"]
    before = {name: sys.modules.pop(name, None) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PEERS))
        found = {name: __import__(name) for name in names}
        found["command_line"] = SimpleNamespace(**_executed(PEERS / "__main__.py"))
        yield SimpleNamespace(**found)
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


def _executed(file: Path) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "peers_command_line", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), space)
    return space


def test_a_ratio_is_to_the_reference_of_the_same_round(peers: Any) -> None:
    table = peers.rounds.lines({"hand_dmp": [10.0, 20.0, 40.0], "peer": [20.0, 20.0, 20.0]}, "hand_dmp")
    assert table[1].split() == ["hand_dmp", "20", "1.00", "(1.00..1.00)"]
    assert table[2].split() == ["peer", "20", "1.00", "(0.50..2.00)"]


def test_rows_run_in_turn_after_a_round_that_is_not_counted(peers: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    note = "import sys; f = open(*sys.argv[1:3]); f.write(sys.argv[3]); print('{\"n\": %d}' % f.tell())"
    commands = {name: [sys.executable, "-c", note, str(log), "a", name] for name in "abc"}
    found = peers.rounds.in_turn(commands, 2, "a")
    assert log.read_text() == "abcabcabc"
    assert found == {"a": [{"n": 4}, {"n": 7}], "b": [{"n": 5}, {"n": 8}], "c": [{"n": 6}, {"n": 9}]}


def test_a_row_that_fails_is_left_out_with_its_last_words(
    peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [sys.executable, "-c", SAY.format(5)]
    bad = [sys.executable, "-c", "raise SystemExit('first line\\nout of memory')"]
    found = peers.rounds.in_turn({"good": good, "bad": bad}, 1, "good")
    assert found == {"good": [{"samples_per_second": 5}]}
    assert capsys.readouterr().out == "bad is left out: it failed: out of memory\n"
    with pytest.raises(SystemExit, match="bad, the reference, failed: out of memory"):
        peers.rounds.in_turn({"bad": bad}, 1, "bad")


def test_an_absent_peer_is_left_out_with_the_way_to_get_it(
    peers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_zoo").mkdir()
    nowhere = {"dlrm": None, "fuxictr": tmp_path}
    places = peers.roster.Places({"deepctr": str(tmp_path / "python")}, nowhere)
    chosen = peers.roster.installed(["hand_dmp", "dlrm", "fuxictr_sgd", "deepctr", "recpipe"], places)
    assert chosen == ["hand_dmp", "recpipe"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("dlrm is left out: there is no checkout of it (--dlrm DIR). Get it: pip")
    assert f"no model_zoo/DLRM/src/DLRM.py in {tmp_path}" in said[1]
    assert "pip install torch fuxictr; git clone https://github.com/reczoo/FuxiCTR" in said[1]
    assert f"no Python at {tmp_path / 'python'}" in said[2]
    assert "pip install torch deepctr-torch" in said[2]


def test_a_module_that_is_not_there_is_named(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    project = peers.roster.Project(("json", "no_such_module"), "pip install it")
    monkeypatch.setitem(peers.roster.PROJECTS, "other", project)
    places = peers.roster.Places({}, {})
    assert places.missing("other") == f"no_such_module in {sys.executable}"
    assert places.missing("recpipe") == ""


def test_the_command_line(peers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse = peers.command_line.arguments_of
    given = parse(["--peers", "dlrm_sgd", "--dlrm", str(tmp_path), "--python", "dlrm=/bin/py", "deepctr=b"])
    peer, directory = peers.roster.PEERS["dlrm_sgd"], Path("data")
    command = given.places.command(peer, directory)
    assert command[0] == "/bin/py"
    assert command[2:] == ["data", "--checkout", str(tmp_path), "--optimizer", "sgd"]
    assert given.places.python("deepctr") == "b"
    assert given.places.python("fuxictr") == sys.executable
    for wrong in ("dlrm", "other=b"):
        with pytest.raises(SystemExit):
            parse(["--python", wrong])
        assert "give NAME=PATH, NAME one of torchrec" in capsys.readouterr().err


@pytest.fixture
def published() -> Any:
    """The comparison of published models."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PEERS))
        yield __import__("published")
    for name in {"published", "published_works", "published_peers", "machine", "rounds"} - before:
        sys.modules.pop(name, None)


def test_published_models_have_their_peers(
    published: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, work in published.WORKS.items():
        assert (PEERS / published.PEERS[work.peer].script).is_file(), name
        compose(published.overrides(name, Path("rows.parquet")))
    monkeypatch.setattr(
        sys, "argv", ["published.py", "taobao=x", "--dlrm", "dlrm", "--models", "tbsm", "din"]
    )
    published.main()
    said = ["tbsm is left out: there is no --tbsm", "din is left out: there is no --fuxictr"]
    assert capsys.readouterr().out.splitlines() == said


def test_histories_are_written_from_either_end(published: Any, tmp_path: Path) -> None:
    rows = pa.table(
        {
            "seen": [0, 1, 0, 1],
            "item": [3, 4, 5, 6],
            "items": [[1, 2], [7], [], [*range(10, 10 + published.HISTORY)]],
        }
    )
    pq.write_table(rows, tmp_path / "rows.parquet")
    words = [
        *("data=files", f"data.path={tmp_path}/rows.parquet", "data.eval_fraction=0.25"),
        "data.features={labels: [seen], features: [{name: item, ids: rows, rows: 99}, "
        "{name: items, kind: sequence, table: item, ids: rows, rows: 99, "
        f"max_length: {published.HISTORY}}}]}}",
        f"data.cache_dir={tmp_path}/cache",
    ]
    ends = {}
    for from_first in (False, True):
        published.write_samples(words, tmp_path / "samples.npz", from_first)
        found = np.load(tmp_path / "samples.npz")
        ends[from_first] = found["train/of_items"]
        assert found["train/of_item"].tolist() == [3, 4, 5]
        assert found["eval/of_items"][0].tolist() == [*range(11, 11 + published.HISTORY)]
    assert ends[False][:, -2:].tolist() == [[2, 3], [0, 8], [0, 0]]
    assert ends[True][:, :2].tolist() == [[2, 3], [8, 0], [0, 0]]
    assert ends[False].sum() == ends[True].sum() == 13


def test_every_row_has_its_script_and_peers_know_nothing_of_recpipe(peers: Any) -> None:
    for name, peer in peers.roster.PEERS.items():
        file = PEERS / peer.script
        imported = [
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom | ast.Import)
        ]
        knows = any(str(module).partition(".")[0] == "recpipe" for module in imported)
        assert not knows or peer.project == "recpipe", name


def test_both_sides_train_the_settings_of_the_comparison(peers: Any, tmp_path: Path) -> None:
    assert len(peers.work.ROWS) == 26
    assert peers.compare.said("small") == "dim 16, batch 2048, bottom 512-256-64-16, top 512-256-1"
    assert peers.compare.said("large") == "dim 64, batch 8192, bottom 512-256-64, top 512-256-1"
    peers.work.write(tmp_path, "small", 2)
    (first, _), names = peers.work.Work.load(tmp_path).batches, list(peers.work.TABLES)
    assert first.ids.shape == (26, 2048)
    assert len(peers.work.Work.load(tmp_path, batch=128).batches) == 32
    distinct = sum(len(row.unique()) for row in first.ids)
    assert 11_700 < distinct < 12_700, "12,206 in the published comparison"
    assert 0.1 < float(first.labels.mean()) < 0.4

    from recpipe.data.make import open_dataset

    recipe = {"name": "npy", "path": str(tmp_path), "tables": peers.work.TABLES, "eval_fraction": 0.0}
    dataset = open_dataset({**recipe, "batch_size": 2048, "cache_dir": str(tmp_path / "cache")}, seed=1)
    batch = next(iter(dataset.batches("train", 2048)))
    assert batch.sparse.keys() == names
    assert batch.sparse.values().long().equal(first.ids.reshape(-1))
    assert batch.dense.equal(first.dense)
    assert batch.labels.equal(first.labels)


def test_losses_are_compared_step_by_step(peers: Any) -> None:
    assert peers.compare.differences([1.0, 2.5], [1.0, 2.0]) == [0.0, 0.25]
    with pytest.raises(SystemExit, match="recpipe made 1 steps, the hand-written loop 2"):
        peers.compare.differences([1.0], [1.0, 2.0])


@pytest.mark.soak
@pytest.mark.parametrize("setting", ["small", "large"])
def test_recpipe_trains_the_losses_of_the_loop_by_hand(peers: Any, tmp_path: Path, setting: str) -> None:
    found = peers.compare.losses(tmp_path, setting, 50, peers.roster.Places({}, {}))
    for run in found.values():
        assert len(run["recpipe"]) == 50
        assert run["recpipe"][-1] < run["recpipe"][0]
    assert max(found["sgd"]["differences"]["recpipe"]) <= 1e-5
    ours, rounding = found["adagrad"]["differences"].values()
    assert max(ours[:10]) <= max(1e-5, 10 * max(rounding[:10]))
    assert max(ours) <= 10 * max(rounding)


@pytest.mark.soak
def test_the_benchmark_runs(tmp_path: Path) -> None:
    source = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    done = subprocess.run(
        [
            *(sys.executable, str(PEERS), "--settings", "tiny", "--repetitions", "1", "--steps", "12"),
            *("--peers", "recpipe", "deepctr", "--python", "deepctr=nowhere"),
        ],
        env={**os.environ, "PYTHONPATH": source},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[-2].startswith("hand_dmp")
    assert rows[-1].startswith("recpipe")
    assert any(row.startswith("deepctr is left out: there is no Python at nowhere") for row in rows)
