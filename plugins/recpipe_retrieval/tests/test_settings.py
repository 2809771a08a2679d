"""Retrieval models find the same candidates whatever keeps their rows while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recpipe_retrieval.command import make_index, retrieve
from safetensors.numpy import load_file

import recpipe
from recpipe.errors import UserError
from tests.distributed.test_runs_of_ranks import as_rank, free_port
from tests.processes import start_ranks

pytest.importorskip("faiss", reason="retrieval needs faiss-cpu, the extra recpipe[retrieval]")
ROWS, ITEMS, HISTORY = 600, 120, 4
FEATURES = (
    "data.features={labels: [bought], features: [{name: user, rows: 60, ids: rows}, "
    f"{{name: item, rows: {ITEMS}, ids: rows}}, {{name: items, kind: sequence, table: item, rows: {ITEMS}, "
    f"ids: rows, max_length: {HISTORY}}}]}}"
)
WORDS = (
    *("data=files", FEATURES, "data.batch_size=64", "model.embedding_dim=8", "trainer.progress=false"),
    *("optim=adagrad", "optim.tables.lr=0.05", "optim.dense.lr=0.05", "trainer.max_epochs=3"),
    *("trainer.backend=plain", "task.page=false", "task.beside=null"),
)
SOFTMAX = (
    "model.loss={name: in_batch_softmax, temperature: 0.2}",
    "data.negatives={feature: item, sampling: in_batch}",
)
MODELS = {
    "two_tower": ("model=two_tower", "model.candidate=[item]", "model.normalize=true"),
    "sasrec": ("model=sasrec", "model.retrieval=true"),
    "hstu": ("model=hstu", "model.retrieval=true"),
}
SSD = ("tiers.store=ssd", "tiers.resident_bytes=40%")
SETTINGS = {
    "lru": (*SSD, "tiers.policy=lru"),
    "bagpipe": (*SSD, "+plugin=bagpipe"),
}
HOTLINE = (*SSD, "+plugin=hotline")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users of six kinds who buy items of their kind, after others of these."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 60, ROWS)
    bought = rng.integers(0, ITEMS // 6, (ROWS, HISTORY + 1)) * 6 + (user % 6)[:, None]
    lengths = rng.integers(1, HISTORY + 1, ROWS)
    lists = [own[:length].tolist() for own, length in zip(bought[:, 1:], lengths, strict=True)]
    table = {"user": user, "item": bought[:, 0], "items": lists, "bought": np.ones(ROWS, np.int64)}
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table(table), file)
    return file


def train(file: Path, folder: Path, *words: str) -> dict[str, Any]:
    cache = f"data.cache_dir={file.parent / 'cache'}"
    with recpipe.train(None, file, *WORDS, cache, *words, output=folder, quiet=True) as run:
        return dict(run.report)


Found = tuple[dict[str, float], dict[str, Any]]


def found(folder: Path, *words: str) -> Found:
    """How high the bought items rank among all, and the vectors of these."""
    index = folder.with_name(f"{folder.name}-index")
    make_index(folder, ["item=item", f"output={index}", f"hydra.run.dir={index}-run", *words])
    own = [f"output={index}.parquet", "k=10", "truth=item", f"hydra.run.dir={index}-found", *words]
    return dict(retrieve(index, own)), load_file(index / "vectors.safetensors")


def require_same(one: Found, other: Found) -> None:
    (figures, vectors), (wanted, of_other) = one, other
    assert {"hr@10", "mrr@10", "ndcg@10"} <= figures.keys()
    assert figures == pytest.approx(wanted, abs=1e-6)
    np.testing.assert_allclose(vectors["candidates"], of_other["candidates"], atol=1e-5)
    assert wanted["hr@10"] > 1.5 * 10 / ITEMS, "something was learned"


@pytest.fixture(scope="module")
def resident(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a model finds that was trained with all rows in memory."""
    folder, made = tmp_path_factory.mktemp("resident"), dict[str, Found]()

    def of(name: str) -> Found:
        if name not in made:
            train(rows, folder / name, *MODELS[name], *SOFTMAX)
            made[name] = found(folder / name)
        return made[name]

    return of


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(name, setting, marks=[pytest.mark.soak] * ((name, setting) != ("two_tower", "lru")))
        for name in MODELS
        for setting in SETTINGS
    ],
)
def test_rows_on_the_ssd_change_no_ranking(
    name: str, setting: str, rows: Path, resident: Any, tmp_path: Path
) -> None:
    train(rows, tmp_path / "run", *MODELS[name], *SOFTMAX, *SETTINGS[setting])
    require_same(found(tmp_path / "run", *SSD), resident(name))
    if setting == "lru":
        train(rows, tmp_path / "other", *MODELS[name], *SOFTMAX, "optim.tables.lr=0.04")
        with pytest.raises(AssertionError):
            require_same(found(tmp_path / "other"), resident(name))


def test_hotline_refuses_a_loss_over_the_batch(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be trained in parts"):
        train(rows, tmp_path / "run", *MODELS["two_tower"], *SOFTMAX, *HOTLINE)


CLICKS = (
    *("model=two_tower", "model.candidate=[item]", "model.retrieval=false"),
    *("model.loss=binary_cross_entropy", "data.negatives={feature: item, sampling: uniform, ratio: 1}"),
    *("optim=sgd", "optim.tables.lr=0.5", "optim.dense.lr=0.5"),
)

SMALLER = "data.batch_size=16"
"""Of two ranks' batches bagpipe keeps the rows of both."""


def ranks(rank: int, port: int, file: str, folder: str) -> None:
    as_rank(rank, port)
    for name, words in (
        ("softmax", (*MODELS["two_tower"], *SOFTMAX)),
        ("softmax-lru", (*MODELS["two_tower"], *SOFTMAX, *SETTINGS["lru"])),
        ("hstu", (*MODELS["hstu"], *SOFTMAX, SMALLER)),
        (
            "hstu-bagpipe",
            (*MODELS["hstu"], *SOFTMAX, *SETTINGS["bagpipe"], SMALLER, "tiers.resident_bytes=80%"),
        ),
        ("clicks", CLICKS),
    ):
        train(Path(file), Path(folder, name), *words)


@pytest.mark.soak
def test_hotline_ranks_as_without_it_where_the_loss_is_a_mean(rows: Path, tmp_path: Path) -> None:
    plain, hot = (train(rows, tmp_path / name, *CLICKS, *own) for name, own in (("a", ()), ("b", HOTLINE)))
    assert hot["quality"] == pytest.approx(plain["quality"], abs=1e-5)


@pytest.mark.soak
def test_two_ranks_rank_alike(rows: Path, tmp_path: Path) -> None:
    """A softmax over the batch is over each rank's share, on all rows in memory and on the SSD alike; a mean
    over samples is that of one process."""
    start_ranks(ranks, (free_port(), str(rows), str(tmp_path)), 2)
    for name, other in (("softmax-lru", "softmax"), ("hstu-bagpipe", "hstu")):
        require_same(found(tmp_path / name), found(tmp_path / other))
    train(rows, tmp_path / "alone", *CLICKS)
    one, two = (recpipe.evaluate(tmp_path / name, None, quiet=True) for name in ("alone", "clicks"))
    both = [{k: v["value"] for k, v in each["tasks"]["score"]["figures"].items()} for each in (one, two)]
    assert both[0] == pytest.approx(both[1], abs=1e-5)
