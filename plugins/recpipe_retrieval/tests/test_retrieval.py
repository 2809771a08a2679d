"""Vectors, indexes and what is found, against plain products of the model's own vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recpipe_retrieval import index as indexes
from recpipe_retrieval.command import make_index, retrieve
from safetensors.numpy import load_file

from recpipe.answers.trained import open_trained
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run

pytest.importorskip("faiss", reason="retrieval needs faiss-cpu, the extra recpipe[retrieval]")
COLUMNS = "[{name: user, rows: 100}, {name: item, rows: 400}, {name: shop, rows: 20}]"
FEATURES = f"data.features={{labels: [bought], features: {COLUMNS}}}"
SMALL = ("data=files", FEATURES, "data.batch_size=64", "model.embedding_dim=8", "trainer.progress=false")
ROWS, ITEMS = 2000, 300


def rows_of_a_shop() -> pa.Table:
    """Users of ten kinds who buy the items of their kind."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 100, ROWS)
    item = (rng.integers(0, ITEMS // 10, ROWS) * 10 + user % 10).astype(np.int64)
    names = [f"sku-{number}" for number in item]
    return pa.table({"user": user, "item": names, "shop": item % 7, "bought": np.ones(ROWS, np.int64)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The data's file and the directory of a run over it."""
    folder = tmp_path_factory.mktemp("retrieval")
    file = folder / "rows.parquet"
    pq.write_table(rows_of_a_shop(), file)
    words = [
        *SMALL,
        f"data.path={file}",
        f"data.cache_dir={folder / 'cache'}",
        "data.negatives={feature: item, sampling: in_batch}",
        "model=two_tower",
        "model.candidate=[item,shop]",
        "model.normalize=true",
        "model.loss={name: in_batch_softmax, temperature: 0.1}",
        "trainer.max_epochs=8",
        "optim=adam",
        "optim.tables.lr=0.02",
        "optim.dense.lr=0.02",
        "task.page=false",
    ]
    run(compose(words), folder / "run")
    return file, folder / "run"


def made(trained: tuple[Path, Path], target: Path, *words: str) -> indexes.About:
    return make_index(trained[1], ["item=item", f"output={target}", f"hydra.run.dir={target}-run", *words])


@pytest.fixture(scope="module")
def flat(trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("indexes") / "flat"
    about = made(trained, target)
    assert (about.item, about.kind, about.dim, about.recall) == ("item", "flat", 32, None)
    return target


def of_model(trained: tuple[Path, Path]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Both vectors of all rows, by the plain module in memory."""
    opened = open_trained(trained[1])
    (batch,) = (b for split in [opened.dataset.batches("train", ROWS)] for b in split)
    held = next(iter(opened.dataset.batches("eval", ROWS)))
    found = [opened.model(b.dense_features, b.sparse_features) for b in (batch, held)]
    return {
        name: np.concatenate([one[name].detach().numpy() for one in found]) for name in ("query", "candidate")
    }


def test_an_index_has_each_candidate_once_with_the_models_vector(trained, flat) -> None:
    table, vectors = pq.read_table(flat / "items.parquet"), load_file(flat / "vectors.safetensors")
    names = rows_of_a_shop().column("item").to_pylist()
    first = {name: row for row, name in reversed([*enumerate(names)])}
    assert table.column("item").to_pylist() == list(dict.fromkeys(names))
    wanted = of_model(trained)["candidate"][[first[name] for name in dict.fromkeys(names)]]
    np.testing.assert_allclose(vectors["candidates"], wanted, atol=1e-5)
    np.testing.assert_array_equal(np.stack(table.column("vector").to_pylist()), vectors["candidates"])


def test_the_best_are_found_and_judged(trained, flat, tmp_path) -> None:
    file = tmp_path / "found.parquet"
    words = [f"output={file}", "k=5", "keys=[user]", "truth=item", f"hydra.run.dir={tmp_path / 'run'}"]
    figures = retrieve(flat, words)
    table, vectors, ids = pq.read_table(file), of_model(trained), pq.read_table(flat / "items.parquet")
    candidates, names = load_file(flat / "vectors.safetensors")["candidates"], ids.column("item").to_pylist()
    scores = vectors["query"] @ candidates.T
    best = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    assert table.column_names == ["user", "candidates", "scores"]
    assert table.column("user").to_pylist() == rows_of_a_shop().column("user").to_pylist()
    own = np.stack(table.column("scores").to_pylist())
    np.testing.assert_allclose(own, np.take_along_axis(scores, best, axis=1), atol=1e-5)
    place = {name: number for number, name in enumerate(names)}
    given = np.array([[place[name] for name in row] for row in table.column("candidates").to_pylist()])
    np.testing.assert_allclose(np.take_along_axis(scores, given, axis=1), own, atol=1e-5)
    right = np.array([place[name] for name in rows_of_a_shop().column("item").to_pylist()])
    hits = given == right[:, None]
    ranks = np.where(hits.any(1), hits.argmax(1) + 1, np.inf)
    assert figures["hr@5"] == figures["recall@5"] == pytest.approx(np.isfinite(ranks).mean())
    assert figures["mrr@5"] == pytest.approx((1 / ranks).mean())
    assert figures["ndcg@5"] == pytest.approx((1 / np.log2(ranks + 1)).mean())
    assert figures["hr@5"] > 2 * 5 / ITEMS  # it has learned something: users buy what is of their kind


@pytest.mark.parametrize(("kind", "least"), [("hnsw", 0.9), ("ivf_pq", 0.3)])
def test_what_an_approximate_search_loses_is_measured(trained, tmp_path, kind: str, least: float) -> None:
    about = made(trained, tmp_path / kind, f"kind={kind}")
    assert about.recall is not None
    assert [*about.recall] == ["recall@10", "recall@100"]
    assert all(least < value <= 1 for value in about.recall.values())
    vectors = load_file(tmp_path / kind / "vectors.safetensors")["candidates"]
    _, ids, search = indexes.read(tmp_path / kind)
    assert len(ids) == search.ntotal == len(vectors)
    alike = indexes.recall_at(indexes.searched("flat", vectors), vectors, vectors[:20], (10,))
    assert alike == {"recall@10": 1.0}  # an exact search loses nothing


def test_mistakes_are_told_in_a_line(trained, flat, tmp_path) -> None:
    def refused(message: str, call: Any, *words: str) -> None:
        with pytest.raises(UserError, match=message):
            call(*words)

    new = [f"output={tmp_path / 'new'}", f"hydra.run.dir={tmp_path / 'run'}"]
    refused("no column 'itm'; did you mean item", make_index, trained[1], ["item=itm", *new])
    refused("item", make_index, trained[1], new)
    refused(
        "kind=tree is unknown; choose one of flat, hnsw, ivf_pq",
        make_index,
        trained[1],
        ["item=item", "kind=tree", *new],
    )
    refused("exists", make_index, trained[1], ["item=item", f"output={flat}"])
    refused("is no index", retrieve, tmp_path, [f"output={tmp_path / 'a.parquet'}"])
    refused("go into a .parquet file", retrieve, flat, [f"output={tmp_path / 'a.csv'}"])
    few = np.eye(8, dtype=np.float32)
    refused("kind=ivf_pq learns 256 codes and there are 8 items", indexes.searched, "ivf_pq", few)


def test_a_model_without_vectors_is_refused(trained, tmp_path) -> None:
    words = [*SMALL, f"data.path={trained[0]}", "model.bottom=[8]", "model.top=[8]", "trainer.max_steps=2"]
    run(compose([*words, "task.page=false", f"data.cache_dir={tmp_path / 'cache'}"]), tmp_path / "dlrm")
    with pytest.raises(UserError, match="gives scores, not vectors of queries and candidates"):
        make_index(
            tmp_path / "dlrm", ["item=item", f"output={tmp_path / 'i'}", f"hydra.run.dir={tmp_path / 'r'}"]
        )
