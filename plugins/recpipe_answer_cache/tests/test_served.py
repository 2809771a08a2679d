"""The cache in front of a server's model, and another plugin's class at the same door."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_answer_cache.plugin import ApproximateKeys
from recpipe_serve import AnswerServer, Asked
from recpipe_serve.batching.batcher import Batcher
from recpipe_serve.command import serve
from recpipe_serve.config import ServeConfig

from recpipe.errors import UserError
from recpipe.plugin import PluginError
from recpipe.plugin.load import installed, instantiate
from recpipe.tasks.plugins import default_knobs

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.http.app import Server
from recpipe_serve.http.features import Features
from recpipe_serve.tests.listening import listening

MANIFEST: dict[str, Any] = {
    "dense": {"names": ["x"]},
    "sparse": [{"name": "a", "rows": 50}],
    "outputs": [{"name": "score", "kind": "clicks"}],
}
KNOBS = {**default_knobs(installed()["answer_cache"]), "bound": 0}


class Model:
    """Scores x + a + ``more``, and counts the samples."""

    def __init__(self, more: float = 0.0) -> None:
        self.more, self.samples = more, 0

    def __call__(self, dense: torch.Tensor, sides: Any) -> torch.Tensor:
        self.samples += len(dense)
        return dense[:, 0] + sum(side.ids.float() for side in sides) + self.more


@contextmanager
def served(model: Model, answers: AnswerServer) -> Iterator[tuple[int, Server]]:
    server = Server(model, MANIFEST, "m", ServeConfig(), answers=answers)
    with listening(server) as (port, _):
        yield port, server


def ask(port: int, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
    found = connection.getresponse().read()
    connection.close()
    return found.decode() if path == "/metrics" else json.loads(found)


def scores(port: int, x: float, ids: list[int]) -> list[float]:
    inputs = [
        {"name": name, "datatype": kind, "shape": shape, "data": data}
        for name, kind, shape, data in (("dense", "FP32", [1, 1], [x]), ("a", "INT64", [len(ids)], ids))
    ]
    return ask(port, "/v2/models/m/infer", {"inputs": inputs})["outputs"][0]["data"]


def score(port: int, x: float, a: int) -> float:
    return scores(port, x, [a])[0]


def test_a_server_answers_from_the_cache_until_another_package_takes_over() -> None:
    model, plugin = Model(), instantiate("answer_cache", KNOBS)
    assert isinstance(plugin, ApproximateKeys)
    plugin.begin(SimpleNamespace(manifest=MANIFEST))
    with served(model, plugin) as (port, server):
        assert [score(port, 1.5, 7) for _ in range(5)] == [8.5] * 5
        assert model.samples == 1
        assert score(port, 1.5, 8) == 9.5
        assert model.samples == 2
        text = ask(port, "/metrics")
        found = {
            name: float(value) for name, value in re.findall(r"^recpipe_(answers_\w+) (\S+)$", text, re.M)
        }
        assert (found["answers_requests"], found["answers_served"], found["answers_missed"]) == (6, 4, 2)
        assert found["answers_off"] == found["answers_error"] == 0
        page = ask(port, "/v2/models/m/monitor")
        assert page["answers"]["served"] == 4
        assert page["samples"]["since_start"] == 6, "answers from the cache are watched, too"
        newer = Model(100.0)
        plugin.begin(SimpleNamespace(manifest=MANIFEST))
        server.use(newer, MANIFEST, "newer")
        assert [score(port, 1.5, 7) for _ in range(2)] == [108.5] * 2
        assert newer.samples == 1


def test_candidates_that_are_known_are_not_scored_and_the_others_are_in_their_places() -> None:
    model, plugin = Model(), instantiate("answer_cache", {**KNOBS, "unit": "candidate"})
    assert isinstance(plugin, ApproximateKeys)
    plugin.begin(SimpleNamespace(manifest=MANIFEST))
    with served(model, plugin) as (port, _):
        for ids, scored in (([7, 8, 9], 3), ([1, 9, 2, 7], 2), ([7, 9], 0), ([8], 0)):
            before = model.samples
            assert scores(port, 1.5, ids) == [1.5 + own for own in ids]
            assert model.samples - before == scored
        page = ask(port, "/v2/models/m/monitor")
        assert page["samples"]["since_start"] == 10, "answers from the cache are watched, too"
        assert "recpipe_answers_served 5.0" in ask(port, "/metrics")


def test_a_waiting_request_of_which_a_part_was_answered_is_scored_whole_by_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "recpipe_serve.batching.batcher.IDLE", float("inf")
    )  # all wait for a turn of the loop
    plugin = instantiate("answer_cache", {**KNOBS, "unit": "candidate"})
    assert isinstance(plugin, ApproximateKeys)
    plugin.begin(SimpleNamespace(manifest=MANIFEST))
    features = Features(MANIFEST, 64)

    def asked(*ids: int) -> Asked:
        return features.asked({"dense": np.array([[1.5]], np.float32), "a": np.array(ids)})

    async def run() -> list[Any]:
        batcher, answers = Batcher(Model(), ServeConfig(), answers=plugin), list[Any]()
        batcher.start()
        batcher.put(asked(1, 2), answers.append)
        await asyncio.sleep(0.05)
        batcher.put(asked(9), answers.append)
        batcher.put(asked(1, 2, 3), answers.append)
        assert [one.samples for one in batcher.queue][-1] == 1
        plugin.begin(SimpleNamespace(manifest=MANIFEST))
        batcher.score = Model(100.0)
        batcher.whole_again()
        await batcher.close()
        return answers

    first, _, last = asyncio.run(run())
    assert first.tolist() == [2.5, 3.5]
    assert last.tolist() == [102.5, 103.5, 104.5]


class Fixed(AnswerServer):
    """Another plugin's: answers a = 7 itself, and fails to keep others."""

    def begin(self, scorer: Any) -> None: ...

    def find(self, asked: Any) -> tuple[Any, Any]:
        return (np.array([-1.0], np.float32), None) if asked.ids[0] == 7 else (None, "ticket")

    def keep(self, ticket: Any, scores: Any) -> None:
        raise ValueError("no room")

    def counted(self) -> Mapping[str, float]:
        return {"fixed": 1.0}

    def told(self) -> Mapping[str, Any]:
        return {"off": None}

    def close(self) -> None: ...


def test_any_answer_server_stands_in_front_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    with served(Model(), Fixed()) as (port, _):
        assert score(port, 1.5, 7) == -1
        assert score(port, 1.5, 8) == 9.5, "what cannot be kept is answered all the same"
        assert "recpipe_fixed 1.0" in ask(port, "/metrics")


def test_who_keeps_answers_and_does_not_follow_what_is_learnt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="learn=true and Fixed: it would keep answers of before an event"):
        serve(tmp_path, ServeConfig(learn=True), answers=Fixed())


def test_it_has_no_part_in_training_and_wrong_knobs_are_one_line() -> None:
    with pytest.raises(PluginError, match="serves a finished model"):
        instantiate("answer_cache", KNOBS).contribute(None)
    for wrong, says in {
        "bound": (2, "bound"),
        "beta": (64.0, "beta_most=32 is below beta=64"),
        "keys": ([{"feature": "x"}], r"keys\[0\].by"),
        "unit": ("user", "unit"),
    }.items():
        with pytest.raises(UserError, match=says[1] if isinstance(says, tuple) else says):
            instantiate("answer_cache", {**KNOBS, wrong: says[0]})
