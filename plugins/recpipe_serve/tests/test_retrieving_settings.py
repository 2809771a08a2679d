"""Retrieve, then rank, over a socket, whatever has kept the rows of both models while they were trained."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("faiss", reason="recpipe[retrieval] is not installed")
pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_retrieval.command import make_index
from recpipe_retrieval.tests.test_settings import MODELS, SETTINGS, SOFTMAX, SSD, train
from recpipe_retrieval.tests.test_settings import rows as rows  # a fixture
from recpipe_serve.tests.test_retrieving import found_by, require_found, served

import recpipe
from tests.compiling import uncompiled
from tests.distributed.test_runs_of_ranks import as_rank, free_port
from tests.processes import start_ranks

pytestmark = pytest.mark.soak
RANKER = (
    *("model=din", "model.hidden=[8]", "model.loss=binary_cross_entropy"),
    "data.negatives={feature: item, sampling: uniform, ratio: 1}",
)
USERS: tuple[dict[str, Any], ...] = (
    {"user": 17, "items": [5, 11, 23]},
    {"user": 0, "items": [6]},
    {"user": 41, "items": [29, 35]},
)
K, N = 5, 40
OF_RANKS = {
    "resident": (),
    "lru": SETTINGS["lru"],
    "bagpipe": ("tiers.store=ssd", "tiers.resident_bytes=100%", "+plugin=bagpipe"),
    "sharded": ("tiers.sharded=true",),
}
Answers = list[dict[str, Any]]


def both(file: Path, folder: Path, setting: Sequence[str]) -> None:
    """Train SASRec as towers and DIN as ranker."""
    train(file, folder / "towers", *MODELS["sasrec"], *SOFTMAX, *setting)
    train(file, folder / "ranker", *RANKER, *setting)


def answers(folder: Path) -> Answers:
    """What a server of the package of both finds for the users, each as it is found and scored by hand."""
    index = folder / "index"
    make_index(folder / "towers", ["item=item", f"output={index}", f"hydra.run.dir={folder}/i", *SSD])
    with uncompiled():
        given: dict[str, Any] = {"dense": "float32", "reference": False, "quiet": True}
        recpipe.package(folder / "ranker", folder / "m.recpipe", index=index, **given)
    with served(folder / "m.recpipe") as (port, _):
        found = [found_by(port, user=user, k=K, n=N) for user in USERS]
    with uncompiled():
        for user, answer in zip(USERS, found, strict=True):
            require_found(answer, folder / "m.recpipe", index, user, N)
    return found


def require_same(one: Answers, other: Answers) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine["items"] == theirs["items"]
        assert mine["scores"]["score"] == pytest.approx(theirs["scores"]["score"], abs=1e-5)
        assert mine["similarity"] == pytest.approx(theirs["similarity"], abs=1e-5)


def test_rows_in_tiers_change_no_answer(rows: Path, tmp_path: Path) -> None:
    found: dict[str, Answers] = {}
    for setting, words in {"resident": (), **SETTINGS}.items():
        both(rows, tmp_path / setting, words)
        found[setting] = answers(tmp_path / setting)
    for setting in SETTINGS:
        require_same(found[setting], found["resident"])
    shutil.rmtree(tmp_path / "lru")
    both(rows, tmp_path / "lru", (*SETTINGS["lru"], "optim.tables.lr=0.04"))
    with pytest.raises(AssertionError):
        require_same(answers(tmp_path / "lru"), found["resident"])


def ranks(rank: int, port: int, file: str, folder: str) -> None:
    as_rank(rank, port)
    for setting, words in OF_RANKS.items():
        both(Path(file), Path(folder, setting), words)


def test_two_ranks_and_their_shards_change_no_answer(rows: Path, tmp_path: Path) -> None:
    start_ranks(ranks, (free_port(), str(rows), str(tmp_path)), 2)
    found = {setting: answers(tmp_path / setting) for setting in OF_RANKS}
    for setting in ("lru", "bagpipe", "sharded"):
        require_same(found[setting], found["resident"])
