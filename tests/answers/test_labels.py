"""A model of two labels with weights, after training: evaluated, predicted, packaged."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recpipe
from recpipe.model.metrics import judge
from recpipe.model.scores import Scores

SIZE = 400
FEATURES = (
    "data.features={labels: [click, {name: seconds, kind: values, weight: trust}], weight: w, "
    "features: [{name: user, rows: 40}, {name: x, kind: dense}]}"
)
SMALL = ("model.bottom=[8]", "model.top=[8]", "model.embedding_dim=4", "data.batch_size=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of rows.parquet and of the run, ``out``."""
    found, rng = tmp_path_factory.mktemp("labels"), np.random.default_rng(2)
    table = pa.table(
        {
            "click": pa.array([None if n % 6 == 0 else int(rng.integers(2)) for n in range(SIZE)], pa.int8()),
            "seconds": pa.array([None if n % 5 == 0 else rng.normal() for n in range(SIZE)], pa.float64()),
            "trust": rng.integers(1, 5, SIZE) / 4,
            "w": rng.integers(0, 9, SIZE) / 2,
            "user": rng.integers(0, 99, SIZE),
            "x": rng.normal(size=SIZE),
        }
    )
    pq.write_table(table, found / "rows.parquet")
    words = (FEATURES, *SMALL, "trainer.progress=false")
    recpipe.train(None, found / "rows.parquet", *words, output=found / "out", quiet=True).close()
    return found


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "report.json").read_text())


def test_evaluate_has_the_figures_of_training_for_each_label(folder: Path, report: dict[str, Any]) -> None:
    found = recpipe.evaluate(folder / "out", None, "split=eval", "by=user", "by_top=2", quiet=True)
    assert [*found["tasks"]] == ["click", "seconds"]
    assert found["weighted"]
    for task, names in (("click", ("auc", "logloss", "ne")), ("seconds", ("mse", "rmse", "mae"))):
        own = found["tasks"][task]
        for name in names:
            assert own["figures"][name]["value"] == report["quality_by_label"][task][name], (task, name)
            assert own["figures"][name]["low"] < own["figures"][name]["value"] < own["figures"][name]["high"]
    assert found["loss"] == pytest.approx(report["quality"]["loss"], rel=1e-12)
    rows = pq.read_table(folder / "rows.parquet").slice(320).to_pylist()
    assert found["tasks"]["click"]["samples"] == sum(r["click"] is not None and r["w"] > 0 for r in rows)
    parts = [part["tasks"]["click"]["samples"] for part in found["by"]["slices"]]
    assert sum(parts) == found["tasks"]["click"]["samples"]


def test_predictions_have_a_column_of_each_label(folder: Path, tmp_path: Path) -> None:
    unlabelled = tmp_path / "new.parquet"
    pq.write_table(pq.read_table(folder / "rows.parquet").select(["user", "x"]), unlabelled)
    target = tmp_path / "scores.parquet"
    recpipe.predict(folder / "out", unlabelled, f"output={target}", quiet=True)
    scores = pq.read_table(target)
    assert scores.column_names == ["row", "click", "seconds"]
    raw = recpipe.predict(folder / "out", unlabelled, "scores=raw", quiet=True)
    assert raw.shape == (SIZE, 2)
    np.testing.assert_allclose(scores["click"].to_numpy(), 1 / (1 + np.exp(-raw[:, 0])), rtol=1e-6)
    np.testing.assert_array_equal(scores["seconds"].to_numpy(), raw[:, 1])


def test_repeated_rows_are_weights(folder: Path) -> None:
    """Figures and intervals: a weight of 2 for all is no weight, and the AUC's interval is near DeLong's."""
    rng = np.random.default_rng(1)
    labels = torch.from_numpy(rng.integers(0, 2, 3000).astype(np.float32))
    scores = torch.from_numpy(rng.normal(size=3000).astype(np.float32)) + labels
    plain, twice = (
        judge(Scores("clicks", labels, scores, weights=w)) for w in (None, torch.full((3000,), 2.0))
    )
    for name, figure in plain.figures.items():
        own = twice.figures[name]
        assert own.value == pytest.approx(figure.value, rel=1e-12), name
        assert own.low == pytest.approx(figure.low, rel=1e-9, nan_ok=True), name
        assert own.high == pytest.approx(figure.high, rel=1e-9, nan_ok=True), name
    masked = torch.ones(3000)
    masked[::3] = 0
    there = masked > 0
    assert judge(Scores("clicks", labels, scores, weights=masked)) == judge(
        Scores("clicks", labels[there], scores[there])
    )


@pytest.mark.soak
def test_a_package_answers_with_both_labels(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "package"
    recpipe.package(folder / "out", target, quiet=True)
    from recpipe.answers.score import Scorer

    scorer = Scorer(target)
    assert [(each["name"], each["kind"]) for each in scorer.manifest["outputs"]] == [
        ("click", "clicks"),
        ("seconds", "values"),
    ]
    with_package = recpipe.predict(
        folder / "out", folder / "rows.parquet", f"package={target}", "scores=raw", quiet=True
    )
    plain = recpipe.predict(folder / "out", folder / "rows.parquet", "scores=raw", quiet=True)
    np.testing.assert_allclose(with_package, plain, rtol=0, atol=1e-5)
    rows = pq.read_table(folder / "rows.parquet").select(["user", "x"]).to_pylist()
    told = served(target, scorer, {"rows": rows})
    assert [*told] == ["click", "seconds"]
    np.testing.assert_allclose(np.stack([*told.values()], 1), with_package, rtol=1e-6)
    assert served(target, scorer, {"rows": rows, "outputs": [{"name": "seconds"}]}) == {
        "seconds": told["seconds"]
    }


NAMED = {
    "mmoe": (("model=mmoe",), ["click", "trusted"]),
    "ple": (("model=ple",), ["click", "trusted"]),
    "esmm": (("model=mmoe", "model.loss=esmm"), ["ctr", "cvr", "ctcvr"]),
}
"""Models of several labels, and the names of their outputs."""


def of_two_clicks(folder: Path, target: Path, *words: str) -> dict[str, Any]:
    """The report of a run for two labels of clicks, which is left in ``target``."""
    labels = "[click, {name: trusted, expression: 'trust >= 0.5'}]"
    columns = "[{name: user, rows: 40}, {name: x, kind: dense}]"
    small = ("model.embedding_dim=4", "model.expert=[8]", "model.tower=[4]", "data.batch_size=64")
    features = f"data.features={{labels: {labels}, features: {columns}}}"
    rows = folder / "rows.parquet"
    with recpipe.train(None, rows, features, *small, *words, output=target, quiet=True) as run:
        return dict(run.report)


@pytest.mark.parametrize("name", [pytest.param("mmoe", marks=pytest.mark.soak), "esmm"])
def test_outputs_have_names_wherever_answers_are_given(folder: Path, tmp_path: Path, name: str) -> None:
    words, names = NAMED[name]
    told = of_two_clicks(folder, tmp_path / "out", *words)["quality_by_label"]
    found = recpipe.evaluate(tmp_path / "out", None, "split=eval", quiet=True)["tasks"]
    assert [*told] == [*found] == names
    for each, own in found.items():
        assert own["figures"]["logloss"]["value"] == pytest.approx(told[each]["logloss"], rel=1e-6)
    target = tmp_path / "scores.parquet"
    recpipe.predict(tmp_path / "out", folder / "rows.parquet", f"output={target}", quiet=True)
    scores = pq.read_table(target)
    assert scores.column_names == ["row", *names]
    if name == "esmm":
        ctr, cvr, both = (scores[each].to_numpy() for each in names)
        np.testing.assert_allclose(both, ctr * cvr, rtol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMED)
def test_packages_and_servers_have_the_names(folder: Path, tmp_path: Path, name: str) -> None:
    from recpipe.answers.score import Scorer

    words, names = NAMED[name]
    of_two_clicks(folder, tmp_path / "out", *words)
    package = recpipe.package(tmp_path / "out", tmp_path / "package", quiet=True)
    scorer, rows = Scorer(package), folder / "rows.parquet"
    assert [each["name"] for each in scorer.manifest["outputs"]] == names
    raw = recpipe.predict(tmp_path / "out", rows, f"package={package}", "scores=raw", quiet=True)
    plain = recpipe.predict(tmp_path / "out", rows, "scores=raw", quiet=True)
    np.testing.assert_allclose(raw, plain, rtol=0, atol=1e-5)
    answer = served(package, scorer, {"rows": pq.read_table(rows).select(["user", "x"]).to_pylist()})
    assert [*answer] == names
    np.testing.assert_allclose(np.stack([*answer.values()], 1), raw, rtol=1e-5, atol=1e-6)


def served(package: Path, scorer: Any, request: dict[str, Any]) -> dict[str, list[float]]:
    """A server's answer, by the names of its outputs."""
    pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
    from recpipe_serve.batching.scorer import RequestScorer
    from recpipe_serve.config import ServeConfig
    from recpipe_serve.http.app import Server

    from recpipe.answers.encoded import read_encoding

    answers: list[Any] = []

    async def asked() -> None:
        encoding = read_encoding(package, scorer.manifest)
        server = Server(RequestScorer(scorer), scorer.manifest, "m", ServeConfig(), preparation=encoding)
        server._send = lambda _, answer: answers.append(answer)  # type: ignore[method-assign]
        server.batcher.start()
        body = json.dumps(request).encode()
        server.infer(SimpleNamespace(fault=None, headers={}, body=body, parts=[]))  # type: ignore[arg-type]
        await server.batcher.close()
        server.monitor.close()

    asyncio.run(asked())
    ((status, body, _),) = answers
    assert status == 200, body
    return {one["name"]: one["data"] for one in json.loads(body)["outputs"]}


def test_types_are_chosen_by_weighted_figures(folder: Path, tmp_path: Path) -> None:
    """Labels that are missing, or weigh nothing, do not count."""
    pytest.importorskip("recpipe_low_precision")
    from recpipe_low_precision.row_types import FLOAT
    from recpipe_low_precision.search import PairedBootstrap
    from recpipe_low_precision.slices import Slice

    from recpipe.answers.trained import open_trained

    several = "[click, {name: seconds, kind: values, weight: trust}]"
    features = FEATURES.replace(several, "[{name: click, on_missing: mask}]")
    out = tmp_path / "out"
    recpipe.train(None, folder / "rows.parquet", features, *SMALL, output=out, quiet=True).close()
    trained = open_trained(out)
    batches = [*trained.dataset.batches("eval", 64)]
    slice_ = Slice(trained.source(), batches, 1 << 20)
    found = slice_.evaluate({"user": FLOAT})
    labels, weights = (torch.cat([getattr(b, name) for b in batches]) for name in ("labels", "weights"))
    assert 0 in weights
    scores = torch.from_numpy(found.logits[:, 0]).float()
    wanted = judge(Scores("clicks", labels, scores, weights=weights)).figures
    assert found.losses.mean() == pytest.approx(wanted["logloss"].value, rel=1e-6)
    assert found.losses.mean() / slice_.base_entropy == pytest.approx(wanted["ne"].value, rel=1e-6)
    plain = judge(Scores("clicks", labels, scores)).figures
    assert plain["logloss"].value != pytest.approx(wanted["logloss"].value, rel=1e-3), "the control"
    bootstrap = PairedBootstrap(len(labels))
    label, logit = slice_.labels[:, 0], found.logits[:, 0]
    apart = bootstrap.auc(label, -logit, logit, slice_.weights[:, 0]).value
    assert apart == pytest.approx(1 - 2 * wanted["auc"].value, rel=1e-6)
