"""Retrieve, then rank, over a real socket: kinds of indexes, reloads of others, and wrong requests.

By default programs are not compiled and the server is a thread of the test's; the soak tests start servers
of compiled ones, as users do.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("faiss", reason="recpipe[retrieval] is not installed")
pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_retrieval import index as indexes
from recpipe_retrieval.command import make_index
from recpipe_serve.config import ServeConfig
from recpipe_serve.fresh.reading import DeltaReader
from recpipe_serve.http.features import Features
from recpipe_serve.http.raw import RawValues
from recpipe_serve.tests.test_candidates import ITEM, PRICE, SEEN, SHOP, USER, shop_rows, trained
from recpipe_serve.tests.test_serving import ask
from recpipe_serve.workers.worker import LARGEST, Worker
from safetensors.numpy import load_file

import recpipe
from recpipe.answers import score
from recpipe.answers.apply import apply_deltas
from recpipe.answers.candidates import ITEMS, RETRIEVER, SEARCH
from recpipe.answers.delta import Change, Version, write_delta
from recpipe.answers.encoded import read_encoding
from recpipe.answers.manifest import RETRIEVAL, read_manifest, write_manifest
from recpipe.private_api.compiled import compiler
from tests.compiling import uncompiled
from tests.pages import DOCS
from tests.processes import Child

needs_compiler = pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here")
PATH = "/v2/models/m/retrieve"
"""Of the server's only model."""
WHO = {"user": 17, "seen": "s1|s4"}
RANKED = [ITEM, SHOP, PRICE, USER, SEEN | {"pooling": "mean"}]
"""The ranker's features. One of the user's is looked up apart from all others."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Towers and a ranker that were trained, an index of all candidates and one of few, and a package."""
    folder, rows = tmp_path_factory.mktemp("shop"), shop_rows()
    pq.write_table(rows, folder / "rows.parquet")
    pq.write_table(rows.slice(0, 100), folder / "few.parquet")
    of_towers = ["model=two_tower", "model.loss=in_batch_softmax", "model.normalize=true"]
    trained(folder, "towers", ["bought"], [USER, SEEN, ITEM, SHOP, PRICE], *of_towers, "trainer.max_steps=4")
    trained(folder, "ranker", ["bought"], RANKED, "model.bottom=[8]", "model.top=[8]", "trainer.max_steps=4")
    for name, words in (("flat", ()), ("few", ("kind=hnsw", f"data.path={folder}/few.parquet"))):
        own = [f"output={folder}/{name}", "item=item", "columns=[shop,price]"]
        make_index(folder / "towers", [*own, f"hydra.run.dir={folder}/{name}-run", *words])
    with uncompiled():
        given: dict[str, Any] = {"dense": "float32", "reference": False, "quiet": True}
        recpipe.package(folder / "ranker", folder / "flat.recpipe", index=folder / "flat", **given)
    return folder


def with_candidates(package: Path, index: Path, **about: Any) -> None:
    """Put the candidates of another index of the same towers into a package, and what the manifest says
    ``about`` them."""
    items = pq.read_table(index / "items.parquet").drop(["vector"])
    pq.write_table(items, package / ITEMS)
    shutil.copyfile(index / "index.faiss", package / SEARCH)
    content = read_manifest(package)
    told = {**content[RETRIEVAL], "items": len(items), **about}
    write_manifest(
        package, {key: value for key, value in content.items() if key != "files"} | {RETRIEVAL: told}
    )


@contextmanager
def served(directory: Path, **words: Any) -> Iterator[tuple[int, socket.socket]]:
    """A worker that serves ``directory``: its port, and the channel on which it is told to load it anew."""
    threads, turn = torch.get_num_threads(), sys.getswitchinterval()
    with uncompiled():
        worker = Worker(directory, ServeConfig(**words), "m")
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with socket.create_server(("127.0.0.1", 0)) as listening, its:
            running = threading.Thread(target=worker.run, args=(listening, its))
            running.start()
            try:
                with mine:
                    assert mine.recv(LARGEST).startswith(b"ready")
                    yield listening.getsockname()[1], mine
            finally:
                running.join()
                torch.set_num_threads(threads)
                sys.setswitchinterval(turn)


def found_by(port: int, path: str = PATH, **request: Any) -> dict[str, Any]:
    status, content = ask(port, "POST", path, json.dumps(request).encode())
    assert status == 200, content
    answer: dict[str, Any] = json.loads(content)
    return answer


def by_hand(directory: Path, user: Mapping[str, Any], items: list[dict[str, Any]]) -> torch.Tensor:
    """What a package gives for the raw values of a user beside those of each item, one row for each."""
    scorer = score.Scorer(directory)
    preparation = read_encoding(directory, scorer.manifest)
    assert preparation is not None
    assert preparation.features is not None
    columns = preparation.features.inputs
    rows = [{n: v for n, v in {**user, **item}.items() if n in columns} for item in items]
    asked = Features(scorer.manifest, 4096, scorer.maps).asked(RawValues(preparation).inputs(rows))
    every = [asked.bags(f, of_each=True, keyed=True) for f in range(len(scorer.manifest["sparse"]))]
    lengths = np.concatenate([np.broadcast_to(own.lengths, len(rows)) for own in every])
    ids = np.concatenate([own.ids for own in every])
    return scorer(*map(torch.from_numpy, (asked.dense, ids, lengths)))


def require_found(
    answer: dict[str, Any], directory: Path, index: Path, user: Mapping[str, Any], n: int
) -> None:
    """The answer has the best of the ``n`` candidates that the index finds for the user's vector, and their
    scores. Those of a flat index are the nearest."""
    items = pq.read_table(index / "items.parquet").drop(["vector"]).to_pylist()
    query = by_hand(directory / RETRIEVER, user, items[:1])[:1].numpy()
    near = (load_file(index / "vectors.safetensors")["candidates"] @ query.T)[:, 0]
    about, _, search = indexes.read(index)
    products, found = (each[0] for each in indexes.best(search, query, n))
    if about.kind == "flat":
        # Items that came too rarely for a row of their own have one vector, and any order.
        np.testing.assert_allclose(near[found], np.sort(near)[::-1][:n], rtol=1e-5, atol=1e-5)
    scores = by_hand(directory, user, [items[place] for place in found]).reshape(-1)
    order = scores.argsort(descending=True, stable=True)[: len(answer["items"])]
    assert answer["items"] == [items[found[place]]["item"] for place in order]
    np.testing.assert_allclose(answer["scores"]["score"], scores[order], rtol=0, atol=1e-5)
    if about.kind != "ivf_pq":  # whose products are of codes
        np.testing.assert_allclose(products, near[found], rtol=0, atol=1e-5)
    np.testing.assert_allclose(answer["similarity"], products[order], rtol=0, atol=1e-5)


def test_candidates_come_over_a_socket_and_others_after_a_reload(shop: Path, tmp_path: Path) -> None:
    directory = tmp_path / "m.recpipe"
    shutil.copytree(shop / "flat.recpipe", directory)
    users = (WHO, {"user": 4, "seen": ""}, {"user": None, "seen": "new"})
    with served(directory) as (port, channel):
        for user in users:
            require_found(found_by(port, user=user, k=7, n=40), directory, shop / "flat", user, 40)
        best = found_by(port, user=WHO, k=7, n=7)["items"]
        others = found_by(port, user=WHO, k=7, n=7, exclude=best[:3])["items"]
        assert len({*others} - {*best}) == 3
        with_candidates(directory, shop / "few", kind="hnsw")
        channel.send(b"reload")
        assert channel.recv(LARGEST).startswith(b"loaded")
        for user in users:
            require_found(found_by(port, user=user, k=7, n=40), directory, shop / "few", user, 40)
        with_candidates(directory, shop / "flat", kind="flat", user=["age", "seen", "user"])
        channel.send(b"reload")
        told = channel.recv(LARGEST).decode()
        assert told.startswith("refused")
        assert "'retrieval' differs, on which clients rely" in told
        assert len(found_by(port, user=WHO, k=99)["items"]) < 99, "the few are still there"


WRONG: dict[str, tuple[int, Any]] = {
    "has no user": (400, {"k": 3}),
    "is no JSON": (400, b"{"),
    "k and n are whole numbers": (400, {"user": WHO, "k": True}),
    "k is at most n": (400, {"user": WHO, "k": 101}),
    "n at most 4096": (400, {"user": WHO, "n": 4097}),
    "no column 'seen'": (400, {"user": {"user": 1}}),
    "column user: holds string, and held numbers": (400, {"user": WHO | {"user": "x"}}),
    "'shop' is of the candidates": (400, {"user": WHO | {"shop": 3}}),
    "exclude has None": (400, {"user": WHO, "exclude": [None]}),
    "exclude is no list": (400, {"user": WHO, "exclude": "sku-1"}),
    "has no output 'click'": (400, {"user": WHO, "by": "click"}),
    "larger than": (413, b" " * (ServeConfig.body_bytes + 1)),
}


def test_wrong_requests_get_a_line_over_a_socket(shop: Path) -> None:
    with served(shop / "flat.recpipe") as (port, _):
        for told, (expected, request) in WRONG.items():
            body = request if isinstance(request, bytes) else json.dumps(request).encode()
            status, content = ask(port, "POST", PATH, body)
            line = json.loads(content)["error"]
            assert (status, "\n" in line) == (expected, False), line
            assert told in line
        for path in (PATH.replace("/m/", "/other/"), PATH.replace("/m/", "/m/versions/2/")):
            assert ask(port, "POST", path, b"{}")[0] == 404
        assert ask(port, "GET", PATH)[0] == 405
        assert found_by(port, user=WHO)["items"], "it goes on"


def test_a_ranker_whose_ids_grow_follows_deltas_and_its_candidates_stay(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items change rows with each other, and one that had none gets one: a delta is followed to the answers
    of the package that it makes."""
    monkeypatch.setattr("recpipe_serve.served.ReaderProcess", DeltaReader)
    grows = [
        {**ITEM, "rows": "dynamic", "capacity": 400},
        SHOP,
        PRICE,
        {**USER, "rows": "dynamic", "capacity": 90},
    ]
    (tmp_path / "rows.parquet").symlink_to(shop / "rows.parquet")
    ranker = trained(
        tmp_path, "grown", ["bought"], grows, "model.bottom=[8]", "model.top=[8]", "trainer.max_steps=3"
    )
    base, deltas = tmp_path / "m.recpipe", tmp_path / "deltas"
    deltas.mkdir()
    with uncompiled():
        recpipe.package(ranker, base, index=shop / "flat", dense="float32", reference=False, quiet=True)
        manifest, draw = read_manifest(base), np.random.default_rng(0)
        (name,) = [feature["map"] for feature in manifest["sparse"] if feature["name"] == "item"]
        held = score.tensors(base / manifest["maps"][name]["file"])
        keys, rows = held["keys"][1:].numpy().copy(), held["rows"][1:].numpy().astype(np.int64)
        table = next(t for lookup in manifest["lookups"] for f, t in lookup["parts"] if f == "item")
        size, width = manifest["tables"][table]["rows"], manifest["tables"][table]["dimension"]
        values = draw.normal(size=(size, width)).astype(np.float32)
        new = {table: (np.arange(size), "fp32", torch.from_numpy(values).view(torch.uint8))}
        change = Change(99, 0.0, 0.0, new, {name: (keys, rows[::-1].copy())}, {})
        delta = write_delta(tmp_path, Version.of_package(base, manifest), change)
        apply_deltas(base, [delta.directory], tmp_path / "after")
        ask_for = {"user": {"user": 17, "seen": "s1|s4"}, "k": 7, "n": 40}
        with served(tmp_path / "after") as (port, _):
            wanted = found_by(port, **ask_for)
        with served(base, follow=str(deltas), poll_seconds=0.01) as (port, _):
            before = found_by(port, **ask_for)
            delta.directory.rename(deltas / delta.directory.name)
            while json.loads(ask(port, "GET", "/v2/models/m/deltas")[1])["answering"] == 0:
                time.sleep(0.01)
            assert found_by(port, **ask_for) == wanted
    assert before["scores"] != wanted["scores"], "or the delta changes nothing"


@pytest.mark.soak  # by default the ranker's ids grow, and the towers' are served as all others are
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_towers_whose_ids_grow_find_what_their_index_does(kind: str, shop: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").symlink_to(shop / "rows.parquet")
    user, item = ({**own, "rows": "dynamic", "capacity": most} for own, most in ((USER, 90), (ITEM, 400)))
    of_towers = ["model=two_tower", "model.loss=in_batch_softmax", "model.normalize=true"]
    given = [user, SEEN, item, SHOP, PRICE]
    trained(tmp_path, "towers", ["bought"], given, *of_towers, "trainer.max_steps=4")
    own = [f"output={tmp_path}/index", "item=item", "columns=[shop,price]", f"kind={kind}"]
    make_index(tmp_path / "towers", [*own, f"hydra.run.dir={tmp_path}/index-run"])
    with uncompiled():
        told: dict[str, Any] = {"dense": "float32", "reference": False, "quiet": True}
        package = recpipe.package(shop / "ranker", tmp_path / "m.recpipe", index=tmp_path / "index", **told)
        assert score.Scorer(package / RETRIEVER).maps, "or no id of the query grows"
        with served(package) as (port, _):
            vectors = set()
            for number in (17, 3, 10**9):  # the last one has no row
                who = {**WHO, "user": number}
                answer = found_by(port, user=who, k=7, n=40)
                require_found(answer, package, tmp_path / "index", who, 40)
                vectors.add(tuple(answer["similarity"]))
            assert len(vectors) > 1, "or rows of users say nothing"


# -- what users do, with compiled programs -------------------------------------------------------

PAGE = DOCS / "guide" / "packages.md"
TITLE = "From clicks to a server that retrieves, then ranks"
OF_TOWERS = "experiment=taobao_two_tower"
"""The word of the page's commands in whose place other towers stand."""


def told() -> tuple[list[list[str]], dict[str, Any], list[str]]:
    """The page's commands but the server's, the request, and what makes SASRec a tower."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {TITLE}\n")[2].partition("\n## ")[0]
    commands, asked = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for line in commands.splitlines()]
    assert lines[-1] == shlex.split("python -m recpipe serve shop.recpipe port=8000")
    (sasrec,) = re.findall(r"`(experiment=taobao_sasrec .*?)` in the place of", section)
    return [words[3:] for words in lines[:-1]], json.loads(shlex.split(asked)[3]), shlex.split(sasrec)


def recpipe_does(folder: Path, *words: str) -> None:
    short = ["trainer.max_steps=40", "trainer.progress=false"] if "=" in words[0] else []
    command = [sys.executable, "-m", "recpipe", *words, *short]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def started(folder: Path, *words: str) -> Iterator[tuple[str, Child]]:
    """A server as ``recpipe serve`` starts it: the host and port of its address."""
    server = Child(folder / "server", "serve", *words, "port=0")
    try:
        found = re.search(r"serving '\w+' at http://(\S+)/v2/models/", server.until("golden"))
        assert found is not None
        yield found[1], server
        server.send(signal.SIGTERM)
        assert server.ended().returncode == 0
    finally:
        server.kill()


def answered(host: str, request: Mapping[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", "/v2/models/shop/retrieve", json.dumps(request))
    response = connection.getresponse()
    content = response.read()
    connection.close()
    assert response.status == 200, content
    answer: dict[str, Any] = json.loads(content)
    return answer


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize(
    ("towers", "kind", "words"),
    [
        ("two_tower", "hnsw", ()),
        ("sasrec", "ivf_pq", ("workers=2",)),
        ("hstu", "flat", ("host=::1",)),
    ],
)
def test_the_pages_commands_serve_what_they_say(
    towers: str, kind: str, words: tuple[str, ...], data_dir: Path, tmp_path: Path
) -> None:
    """Of every kind of tower and index, by one process and by two, over both families of addresses."""
    commands, request, sasrec = told()
    (tmp_path / "taobao_110k.parquet").symlink_to(data_dir / "taobao_110k.parquet")
    own = {"two_tower": [OF_TOWERS], "sasrec": sasrec}
    own["hstu"] = [sasrec[0].replace("sasrec", "hstu"), *sasrec[1:]]
    if towers == "hstu":  # which looks at the times of events, too
        request["user"] |= {"ts": 1511700000, "ts_history": [1511690000, 1511690010, 1511699000]}
    for command in commands:
        line = [word for each in command for word in (own[towers] if each == OF_TOWERS else [each])]
        recpipe_does(tmp_path, *(f"kind={kind}" if word == "kind=hnsw" else word for word in line))
    package, index, items = tmp_path / "shop.recpipe", tmp_path / "items", request["k"]
    users = [request["user"], {**request["user"], "user": None}]
    with started(tmp_path, str(package), *words) as (host, server):
        for user in users:
            found = answered(host, request | {"user": user})
            assert len(found["items"]) == items
            require_found(found, package, index, user, request["n"])
        several = "workers=2" in words
        # Another index of the same towers, with the candidates of some rows.
        some = pq.read_table(tmp_path / "taobao_110k.parquet").slice(0, 20_000)
        pq.write_table(some, tmp_path / "some.parquet")
        recpipe_does(
            tmp_path,
            "index",
            "towers",
            "item=item",
            "output=fewer",
            "columns=[category]",
            "data.path=some.parquet",
        )
        recpipe_does(tmp_path, "package", "ranker", "shop.recpipe", "index=fewer", "overwrite=true")
        server.send(signal.SIGHUP)
        server.until("now serving package")
        for user in users * (8 if several else 1):
            require_found(answered(host, request | {"user": user}), package, tmp_path / "fewer", user, 200)
