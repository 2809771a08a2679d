"""Retrieve, then rank: what a server answers is what is found and scored by hand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("faiss", reason="recpipe[retrieval] is not installed")
pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_retrieval.command import make_index, retrieve
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.config import ServeConfig
from recpipe_serve.http.app import Server
from recpipe_serve.http.features import Features
from recpipe_serve.http.raw import RawValues
from recpipe_serve.served import Loaded, load

import recpipe
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run

ITEM = {"name": "item", "rows": 400, "side": "item"}
SHOP = {"name": "shop", "rows": 20, "side": "item"}
PRICE = {"name": "price", "kind": "dense", "scale": "log1p", "side": "item"}
TAGS = {"name": "tags", "kind": "multi_hot", "separator": "|", "rows": 30, "side": "item"}
SEEN = {"name": "seen", "kind": "multi_hot", "separator": "|", "rows": 50}
USER, AGE = {"name": "user", "rows": 100, "side": "user"}, {"name": "age", "kind": "dense"}
BOTH = {"name": "both", "kind": "cross", "of": ["user", "shop"], "rows": 64}
WHO = {"user": 17, "age": 31.5, "seen": "s1|s4"}
ROWS = 1200


def shop_rows() -> pa.Table:
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 100, ROWS), rng.integers(0, 150, ROWS)
    columns = {"user": user, "age": (user % 50).astype(float), "bought": rng.integers(0, 2, ROWS)}
    columns["liked"] = rng.integers(0, 2, ROWS)
    seen = ["|".join(f"s{n}" for n in rng.integers(0, 9, rng.integers(0, 4))) for _ in range(ROWS)]
    tags = ["|".join(f"t{n}" for n in range(number % 4)) for number in item]
    names = [f"sku-{number}" for number in item]
    of_item = {"item": names, "shop": item % 7, "price": 1.0 + item % 13, "tags": tags}
    return pa.table({**columns, "seen": seen, **of_item})


def trained(folder: Path, name: str, labels: list[str], features: list[dict[str, Any]], *words: str) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({"labels": labels, "features": features}))
    data = [f"data.path={folder}/rows.parquet", f"data.features={file}", f"data.cache_dir={folder}/cache"]
    usual = ["data.batch_size=64", "model.embedding_dim=8", "trainer.progress=false", "task.page=false"]
    run(compose(["data=files", *data, *usual, "trainer.max_steps=20", *words]), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("candidates")
    pq.write_table(shop_rows(), folder / "rows.parquet")
    loss = [
        "model=two_tower",
        "model.loss={name: in_batch_softmax, temperature: 0.1}",
        "model.normalize=true",
    ]
    towers = trained(folder, "towers", ["bought"], [USER, SEEN, ITEM, SHOP, PRICE], *loss)
    index = ["item=item", f"output={folder}/index", "columns=[tags]", f"hydra.run.dir={folder}/i"]
    make_index(towers, index)
    every = [USER, AGE, SEEN, ITEM, SHOP, PRICE, TAGS, BOTH]
    ranker = trained(folder, "ranker", ["bought", "liked"], every, "model=mmoe", "trainer.max_steps=30")
    given: dict[str, Any] = {"dense": "float32", "reference": False, "quiet": True}
    recpipe.package(ranker, folder / "both.recpipe", index=folder / "index", **given)
    return folder


@pytest.fixture(scope="module")
def loaded(packages: Path) -> Loaded:
    return load(packages / "both.recpipe")


def posted(loaded: Loaded, *bodies: Any, maker: type[Server] = Server) -> list[tuple[int, dict[str, Any]]]:
    """What a server answers to these requests, which come at once."""
    scorer = loaded.scorer
    more = (ServeConfig(), False, None, 0, loaded.preparation, scorer.maps, loaded.candidates)
    server = maker(RequestScorer(scorer), scorer.manifest, "m", *more)
    app = server.app()

    async def one(body: Any) -> tuple[int, dict[str, Any]]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {
                "type": "http.request",
                "body": body if isinstance(body, bytes) else json.dumps(body).encode(),
            }

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v2/models/m/retrieve", "headers": []}
        await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
        return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]))

    async def all_of() -> list[tuple[int, dict[str, Any]]]:
        server.batcher.start()
        return await asyncio.gather(*(one(body) for body in bodies))

    return asyncio.run(all_of())


def by_hand(folder: Path, loaded: Loaded, ids: list[str]) -> torch.Tensor:
    """The ranker's scores of these items for the user: each pair's raw values, whole, in one row."""
    table = shop_rows()
    first = {name: row for row, name in reversed([*enumerate(table.column("item").to_pylist())])}
    columns = ("item", "shop", "price", "tags")
    rows = [WHO | {c: table.column(c)[first[name]].as_py() for c in columns} for name in ids]
    assert loaded.preparation is not None
    asked = Features(loaded.scorer.manifest, 4096).asked(RawValues(loaded.preparation).inputs(rows))
    every = [asked.bags(f, of_each=True) for f in range(len(loaded.scorer.manifest["sparse"]))]
    ids_of = torch.from_numpy(np.concatenate([own.ids for own in every]))
    lengths = [np.broadcast_to(own.lengths, len(rows)) for own in every]
    return loaded.scorer(torch.from_numpy(asked.dense), ids_of, torch.from_numpy(np.concatenate(lengths)))


@pytest.mark.soak
def test_an_answer_is_what_is_found_and_scored_by_hand(
    packages: Path, loaded: Loaded, tmp_path: Path
) -> None:
    ((status, found),) = posted(loaded, {"user": WHO, "k": 5, "n": 30})
    assert status == 200, found
    assert (found["by"], [*found["scores"]]) == ("bought", ["bought", "liked"])
    # What is found: recpipe retrieve, of the same user among the rows of the data.
    one = shop_rows().slice(0, 1).to_pylist()[0] | WHO
    pq.write_table(pa.Table.from_pylist([one], shop_rows().schema), tmp_path / "one.parquet")
    words = [f"output={tmp_path}/found.parquet", "k=30", f"data.path={tmp_path}/one.parquet"]
    retrieve(packages / "index", [*words, f"hydra.run.dir={tmp_path}/run"])
    ids = pq.read_table(tmp_path / "found.parquet").column("candidates").to_pylist()[0]
    scores = by_hand(packages, loaded, ids)
    best = torch.sort(scores[:, 0], descending=True, stable=True).indices[:5].tolist()
    assert found["items"] == [ids[place] for place in best]
    for place, name in enumerate(("bought", "liked")):
        assert found["scores"][name] == scores[best, place].tolist()  # bit by bit
    ((_, liked),) = posted(loaded, {"user": WHO, "k": 5, "n": 30, "by": "liked"})
    assert liked["scores"]["liked"] == sorted(scores[:, 1].tolist(), reverse=True)[:5]
    assert liked["items"] != found["items"]


@pytest.mark.soak
def test_seen_items_are_left_out_and_nothing_may_be_left(loaded: Loaded) -> None:
    assert loaded.candidates is not None
    every = loaded.candidates.ids
    requests = [
        {"user": WHO, "k": 20, "n": 20},
        {"user": WHO, "k": 20, "n": 20, "exclude": [*every[:9], "sku-none"]},
        {"user": WHO, "exclude": every},
        {"user": WHO, "k": 400, "n": 400},
    ]
    whole, fewer, none, most = (answer for _, answer in posted(loaded, *requests))
    assert len(whole["items"]) == len(fewer["items"]) == 20  # others come in their place
    assert not {*fewer["items"]} & {*every[:9]}
    assert none["items"] == []
    assert none["scores"] == {"bought": [], "liked": []}
    assert sorted(most["items"]) == sorted(every)


@pytest.mark.soak
def test_wrong_requests_are_told_in_a_line(loaded: Loaded) -> None:
    wrong = {
        "has no user": {"k": 3},
        "k and n are whole numbers": {"user": WHO, "k": 0},
        "k is at most n": {"user": WHO, "k": 101},
        "n at most 4096": {"user": WHO, "n": 5000},
        "no column 'seen'": {"user": {"user": 1, "age": 1.0}},
        "'price' is of the candidates": {"user": WHO | {"price": 3.0}},
        "'agee' is read by no feature. did you mean 'age'": {"user": WHO | {"agee": 3.0}},
        "has no 'topk'": {"user": WHO, "topk": 3},
        "has no output 'click'": {"user": WHO, "by": "click"},
        "exclude has 7": {"user": WHO, "exclude": [7]},
        "is no JSON": b"{",
    }
    for told, (status, answer) in zip(wrong, posted(loaded, *wrong.values()), strict=True):
        assert (status, "\n" in answer["error"]) == (400, False)
        assert told.lower() in answer["error"].lower()
    ((status, answer),) = posted(Loaded(loaded.scorer, "", loaded.preparation), {"user": WHO})
    assert status == 400
    assert "has no candidates" in answer["error"]


@pytest.mark.soak
def test_an_altered_index_is_refused_and_a_package_is_made_anew_with_it(
    packages: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"dense": "float32", "reference": False, "quiet": True}
    again = recpipe.package(packages / "both.recpipe", tmp_path / "again.recpipe", **given)
    first, second = (posted(load(each), {"user": WHO}) for each in (packages / "both.recpipe", again))
    assert first == second
    file = again / "candidates" / "index.faiss"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="index.faiss is not as it was written"):
        load(again)


@pytest.mark.soak
def test_a_ranker_that_does_not_fit_is_refused(packages: Path, tmp_path: Path) -> None:
    brand = {"name": "brand", "column": "user", "rows": 9, "side": "item"}
    ranker = trained(packages, "odd", ["bought"], [SEEN, brand, ITEM], "model=dcnv2")
    with pytest.raises(
        UserError, match="'?brand'? is of side: item, and the index does not have the column user"
    ):
        recpipe.package(ranker, tmp_path / "p", index=packages / "index", reference=False, quiet=True)
    with pytest.raises(UserError, match="is no index"):
        recpipe.package(ranker, tmp_path / "p", index=tmp_path, reference=False, quiet=True)
