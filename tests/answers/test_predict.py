"""Scores in the order of the input's rows, in a file that is whole or not there."""

from __future__ import annotations

import gzip
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import recpipe
from recpipe import cli
from recpipe.answers import predict as prediction
from recpipe.answers.trained import open_trained
from recpipe.errors import DataError, UserError
from recpipe.tables import inputs, proxy
from tests.answers.answers import PLAIN, SMALL, Answers, clicks, put
from tests.data.conftest import TABLES, make_row
from tests.processes import Child

UNLABELLED = ["click"]


def test_a_row_of_the_output_is_of_the_row_of_the_input(answers: Answers, tmp_path: Path) -> None:
    """Three files of several row groups, keys in no order; each file scored alone gives the same."""
    folder = tmp_path / "new"
    folder.mkdir()
    tables = [
        clicks(rows, seed, shuffled=True).drop_columns(UNLABELLED) for seed, rows in enumerate((700, 90, 801))
    ]
    files = [put(table, folder / f"part_{i}.parquet", 130) for i, table in enumerate(tables)]
    out = tmp_path / "scores.parquet"
    made = recpipe.predict(
        answers.folder, folder, "keys=[key,city]", "data.batch_size=64", output=out, quiet=True
    )
    assert made == out
    found = pq.read_table(out)
    assert found.column_names == ["key", "city", "score"]
    assert found.column("key").to_pylist() == [k for t in tables for k in t.column("key").to_pylist()]
    assert found.column("city").to_pylist() == [c for t in tables for c in t.column("city").to_pylist()]
    assert found.schema.field("score").type == pa.float32()
    alone = np.concatenate([recpipe.predict(answers.folder, file, quiet=True) for file in files])
    np.testing.assert_allclose(found.column("score").to_numpy(), alone, rtol=1e-5)
    shuffled = np.concatenate([alone[1:], alone[:1]])  # the control: rows moved by one are another answer
    assert not np.allclose(found.column("score").to_numpy(), shuffled, rtol=1e-5)
    assert not list(tmp_path.glob(".scores*"))


@pytest.mark.parametrize(
    ("tasks", "told"), [(1, r"row 66 \(from 0\) is \[nan\]"), (2, r"row 66 \(from 0\) is \[0\.5, inf\]")]
)
def test_the_first_score_that_is_no_number_is_named(tasks: int, told: str) -> None:
    """In the second of two batches of 64 rows, raw and of as many tasks."""
    batches = [torch.full((64, tasks), 0.5) for _ in range(2)]
    batches[1][2, -1] = float("nan" if tasks == 1 else "inf")
    batches[1][9, 0] = float("nan")
    kinds = {f"t{n}": SimpleNamespace(kind="clicks") for n in range(tasks)}
    scoring = SimpleNamespace(
        tasks=kinds,
        batch_size=64,
        checked=lambda given: given,
        scores=lambda given, labelled: (SimpleNamespace(scores=b.squeeze(1)) for b in given),
    )
    dataset = SimpleNamespace(
        splits=("train", "eval"),
        size=lambda split: 64,
        batches=lambda split, _: batches[:1] if split == "train" else batches[1:],
    )
    found = prediction._scored(scoring, dataset, SimpleNamespace(scores="raw"))  # type: ignore[arg-type]
    assert np.array_equal(next(found), batches[0].squeeze(1).numpy())
    with pytest.raises(UserError, match=told):
        next(found)


def test_each_id_is_checked_once(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, checked = recpipe.predict(answers.folder, answers.file, quiet=True), []
    for module in (inputs, proxy):
        own = module.require_ids
        monkeypatch.setattr(module, "require_ids", lambda *given, own=own: checked.append(own) or own(*given))
    found = recpipe.predict(answers.folder, answers.file, "data.batch_size=1000", quiet=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(checked) == 3


def test_scores_are_those_of_the_evaluation(answers: Answers, tmp_path: Path) -> None:
    opened = open_trained(answers.folder)
    with opened.scoring() as scoring:
        wanted = [
            scored.scores for split in ("train", "eval") for scored in scoring.scores(scoring.batches(split))
        ]
    raw = recpipe.predict(answers.folder, None, "scores=raw", "data.batch_size=128", quiet=True)
    np.testing.assert_allclose(raw, np.concatenate([part.numpy() for part in wanted]), rtol=1e-4, atol=1e-6)
    chances = recpipe.predict(answers.folder, quiet=True)
    np.testing.assert_allclose(chances, 1 / (1 + np.exp(-raw)), rtol=1e-4)


def test_csv_has_row_numbers_and_is_replaced_only_if_asked(answers: Answers, tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    recpipe.predict(answers.folder, output=out, quiet=True)
    found = pa.csv.read_csv(out)
    assert found.column_names == ["row", "score"]
    assert found.column("row").to_pylist() == list(range(len(found)))
    before = out.read_bytes()
    with pytest.raises(UserError, match="exists already; choose another file, or pass overwrite=true"):
        recpipe.predict(answers.folder, None, "scores=raw", output=out, quiet=True)
    assert out.read_bytes() == before
    recpipe.predict(answers.folder, None, "scores=raw", "overwrite=true", output=out, quiet=True)
    assert out.read_bytes() != before


def criteo(file: Path, lines: list[str], labelled: bool) -> Path:
    with gzip.open(file, "wt") as out:
        out.writelines((line if labelled else line.partition("\t")[2]) + "\n" for line in lines)
    return file


def test_criteo_with_and_without_labels(tmp_path: Path) -> None:
    """The test file of the Criteo challenge has no label; both give the same scores, and keys are text."""
    rng = random.Random(1)
    lines = [make_row(rng) for _ in range(400)]
    tables = "{" + ", ".join(f"{name}: {rows}" for name, rows in TABLES.items()) + "}"
    first = criteo(tmp_path / "a.tsv.gz", lines, labelled=True)
    words = ("data=criteo", f"data.path={first}", f"data.tables={tables}", *SMALL, *PLAIN)
    recpipe.train(None, None, *words, output=tmp_path / "run", quiet=True).close()
    new = criteo(tmp_path / "b.tsv.gz", lines, labelled=False)
    out = tmp_path / "scores.parquet"
    recpipe.predict(tmp_path / "run", new, "keys=[C1,I2]", output=out, quiet=True)
    found = pq.read_table(out)
    np.testing.assert_array_equal(
        found.column("score").to_numpy(), recpipe.predict(tmp_path / "run", quiet=True)
    )
    assert found.column("C1").to_pylist() == [line.split("\t")[14] or None for line in lines]
    with pytest.raises(DataError, match="a test file without labels"):
        recpipe.evaluate(tmp_path / "run", new, quiet=True)
    by_dense = recpipe.evaluate(tmp_path / "run", None, "by=I1", "by_top=3", quiet=True)["by"]["slices"]
    assert by_dense[-1]["value"] == "missing"
    lines[7] = lines[7].replace("\t", "\tx", 1)
    broken = criteo(tmp_path / "c.tsv.gz", lines, labelled=False)
    with pytest.raises(
        DataError, match=r"c\.tsv\.gz, row 8: column I1: 'x.*' is not a finite number; correct it: every row"
    ):
        recpipe.predict(tmp_path / "run", broken, output=tmp_path / "no.csv", quiet=True)
    assert not list(tmp_path.glob("*no.csv*"))
    assert not list(tmp_path.glob(".no.csv*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["output=scores.txt"], "must end in .parquet or .csv"),
        (["output=no/such/scores.csv"], "there is no directory"),
        (["output=s.csv", "keys=[kee]"], "no column 'kee'; did you mean key?"),
        (["output=s.csv", "keys=[key,key]"], "would be called 'key'"),
        (["output=s.csv", "keys=[tags]"], "cannot write output"),
        (["output=s.csv", "data.on_bad_row=skip"], "a row that is left out would have no score"),
        (["output=s.csv", "scores=logit"], "scores=logit"),
        (["output=s.csv", "overwrite=1"], "overwrite=1"),
        ([], "needs a file for its scores"),
        (["outputs=s.csv"], "recpipe predict has no outputs. Did you mean 'output'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_one_line(
    answers: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["recpipe", "predict", str(answers.folder), *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr().err
    assert caught.value.code == 2, said
    assert said.count("\n") == 1
    assert message in said
    assert not list(tmp_path.rglob("*.csv"))


def test_the_input_is_not_overwritten_and_no_rows_are_a_line(answers: Answers, tmp_path: Path) -> None:
    mine = put(clicks(100, 2), tmp_path / "mine.parquet")
    before = mine.read_bytes()
    (tmp_path / "link.parquet").symlink_to(mine)
    for target in (mine, tmp_path / "link.parquet"):
        with pytest.raises(UserError, match="is a file of the input; choose another file"):
            recpipe.predict(answers.folder, mine, "overwrite=true", output=target, quiet=True)
    assert mine.read_bytes() == before
    none = put(clicks(100, 2).slice(0, 0), tmp_path / "none.parquet")
    for output in (tmp_path / "scores.csv", None):
        with pytest.raises(UserError, match=r"none\.parquet: there are no rows to score"):
            recpipe.predict(answers.folder, none, output=output, quiet=True)
    assert not (tmp_path / "scores.csv").exists()


def test_memory_does_not_grow_with_the_rows(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept at a time is one group of rows, however many there are."""
    monkeypatch.setattr(prediction, "GROUP_ROWS", 200)
    most = 0
    grouped = prediction._grouped

    def watched(tables):
        nonlocal most
        for table in grouped(tables):
            most = max(most, len(table))
            yield table

    monkeypatch.setattr(prediction, "_grouped", watched)
    out = tmp_path / "s.parquet"
    recpipe.predict(answers.folder, None, "data.batch_size=64", output=out, quiet=True)
    assert 200 <= most < 200 + 64
    assert pq.ParquetFile(out).num_row_groups > 10


def test_a_kill_leaves_no_file_of_that_name_and_the_next_run_is_whole(
    answers: Answers, tmp_path: Path
) -> None:
    script = """
import os, signal, sys
from recpipe.answers import predict
stream = predict._grouped
def killed(tables):
    for number, table in enumerate(stream(tables)):
        yield table
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
predict._grouped, predict.GROUP_ROWS = killed, 100
from recpipe.cli import main
main()
"""
    words = ["predict", str(answers.folder), "output=s.parquet", "data.batch_size=100"]
    child = Child(tmp_path / "run", *words, script=script)
    child.process.join()
    assert child.process.exitcode == -signal.SIGKILL, child.err.read_text()
    assert not (tmp_path / "run" / "s.parquet").exists()
    assert any((tmp_path / "run").iterdir())  # the hidden part
    recpipe.predict(answers.folder, output=tmp_path / "run" / "s.parquet", quiet=True)
    assert pq.read_table(tmp_path / "run" / "s.parquet").num_rows == 3000
    assert not list((tmp_path / "run").glob(".s.parquet*"))
