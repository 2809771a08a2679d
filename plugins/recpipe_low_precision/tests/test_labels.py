"""A model of two labels, of which one is missing now and then: its types keep the bound for both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recpipe
from recpipe.errors import UserError
from recpipe.model.metrics import auc

SIZE, HELD_OUT = 4000, 1000
FEATURES = "features: [{name: user, ids: rows, rows: 200}, {name: item, ids: rows, rows: 300}]"
KNOBS = ("types=[int8]", "minimise=bytes", "dense=float32", "bound=0.002")
WITH = ("+plugin=low_precision", *(f"plugins.low_precision.{knob}" for knob in KNOBS))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(6)
    user, item = rng.integers(0, 200, SIZE), rng.integers(0, 300, SIZE)
    click = rng.random(SIZE) < 1 / (1 + np.exp(rng.normal(size=200)[user] + rng.normal(size=300)[item]))
    buy = click & (rng.random(SIZE) < 0.4)
    table = {
        **{"user": user, "item": item, "seconds": rng.random(SIZE), "click": click.astype(int)},
        **{"buy": pa.array(np.where(click, buy, 0), mask=rng.random(SIZE) < 0.3)},
    }
    found = tmp_path_factory.mktemp("labels") / "rows.parquet"
    pq.write_table(pa.table(table), found)
    return found


def trained(file: Path, folder: Path, labels: str) -> Path:
    words = (
        *(f"data.features={{labels: {labels}, {FEATURES}}}", f"data.cache_dir={file.parent}/cache"),
        *("data.eval_fraction=0.25", "data.batch_size=250", "model.embedding_dim=16", "model.bottom=[16]"),
        *("model.top=[16]", "trainer.backend=plain", "trainer.logger=null"),
    )
    with recpipe.train(None, file, *words, output=folder, quiet=True) as run:
        return Path(run.checkpoint)


def test_each_label_keeps_the_bound(file: Path, tmp_path: Path) -> None:
    checkpoint = trained(file, tmp_path / "run", "[click, buy]")
    made = tmp_path / "made"
    report = recpipe.quantize(checkpoint, None, *WITH, output=made, quiet=True)
    of_label = report["test"]["labels"]
    assert list(of_label) == ["click", "buy"]
    assert report["test"]["ne_difference"] == of_label["click"]["ne_difference"]
    assert report["bytes"]["ratio"] > 2
    assert report["calibration"]["upper"] <= 0.002
    rows = pq.read_table(file).slice(SIZE - HELD_OUT)
    test = rows.slice(HELD_OUT // 2)
    pq.write_table(test, tmp_path / "test.parquet")
    for directory, model in ((checkpoint, "float32"), (made / "quantized", "quantized")):
        scores = recpipe.predict(directory, tmp_path / "test.parquet", "scores=raw", quiet=True)
        for name, own in of_label.items():
            known = np.asarray(test[name].is_valid())
            label = np.asarray(test[name].fill_null(0), np.float64)[known]
            logits = np.asarray(scores, np.float64)[known, list(of_label).index(name)]
            losses = np.logaddexp(0, logits) - label * logits
            rate = label.mean()
            entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
            assert own[model]["ne"] == pytest.approx(losses.mean() / entropy, rel=1e-5)
            assert own[model]["auc"] == pytest.approx(auc(label, torch.from_numpy(logits).float()), abs=1e-5)
    assert "normalized entropy of buy" in (made / "report.html").read_text()


def test_a_label_that_is_no_click_is_one_line(file: Path, tmp_path: Path) -> None:
    checkpoint = trained(file, tmp_path / "run", "[click, {name: seconds, kind: values}]")
    with pytest.raises(UserError, match="must predict a click a sample, or one for each label"):
        recpipe.quantize(checkpoint, None, *WITH, quiet=True)
