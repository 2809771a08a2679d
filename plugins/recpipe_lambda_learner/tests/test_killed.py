"""What a stream and a server learn is whole after they were killed, and reaches servers by deltas."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_lambda_learner.tests.test_task import clicks, told, words
from recpipe_serve.fresh.reading import DeltaReader
from recpipe_serve.fresh.versions import Versions

import recpipe
from recpipe.answers.apply import apply_deltas
from recpipe.answers.delta import deltas_in
from recpipe.answers.effects import newest_effects
from recpipe.answers.score import Scorer, tensors
from recpipe.errors import UserError
from tests.compiling import uncompiled

__all__ = ["clicks"]
pytestmark = pytest.mark.soak  # runs, packages, and servers of their own
pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
EFFECTS = (
    "lambda.effects=[{entity: user, inputs: [intercept, last_layer]}, "
    "{entity: item, inputs: [intercept, price]}]"
)
TOKEN = "0123456789abcdef"
KILLS, BODIES, EVENTS = 20, 80, 20


def scored(scorer: Scorer) -> np.ndarray:
    draw = np.random.default_rng(0)
    users, items = draw.integers(1, 5000, 64), draw.integers(1, 3000, 64)
    ids = np.concatenate([users, items])
    dense = draw.normal(size=(64, 1)).astype(np.float32)
    given = map(torch.from_numpy, (dense, ids, np.ones(128, np.int64)))
    return scorer(*given).numpy()


def test_a_server_follows_what_a_stream_learns(clicks: Path, tmp_path: Path) -> None:
    fresh, first = tmp_path / "fresh", tmp_path / "first"
    told(first, *words(clicks, EFFECTS))
    given: dict[str, Any] = {"reference": False, "quiet": True}
    publishes = [f"lambda.checkpoint={first}", f"lambda.publish.dir={fresh}", "lambda.publish.every=5"]
    with uncompiled():
        base = recpipe.package(first, tmp_path / "m.recpipe", effects=first, **given)
        publishes.append(f"lambda.publish.base={base}")
        for number in range(2):
            # The second one is killed and begins anew, while the chain is at the end.
            told(tmp_path / f"run {number}", *words(clicks, EFFECTS, *publishes))
            assert [*deltas_in(fresh)] == [*range(1, 3 + 2 * number)]
        after = recpipe.package(first, tmp_path / "after.recpipe", effects=tmp_path / "run 1", **given)
        versions, wanted = Versions(base, 8), scored(Scorer(after))
        known = [scored(versions.answering)]
        for number in deltas_in(fresh):
            versions.add(versions.reader(DeltaReader, None).read(fresh / f"delta-{number:08d}"))
            versions.swap()
            known.append(scored(versions.answering))
        np.testing.assert_array_equal(known[-1], wanted)
        assert [own.tobytes() == wanted.tobytes() for own in known] == [True, False, True, False, True]
        for number in (1, 4, 0):
            versions.move(number)
            versions.swap()
            np.testing.assert_array_equal(scored(versions.answering), known[number])
        apply_deltas(base, [fresh], tmp_path / "applied")
        np.testing.assert_array_equal(scored(Scorer(tmp_path / "applied")), wanted)
    folder = after / "effects"
    for file in folder.iterdir():
        mine = tmp_path / "applied" / "effects" / file.name
        if file.suffix == ".json":
            assert newest_effects(mine.parent)[1].number == newest_effects(folder)[1].number
            continue
        found, right = tensors(mine), tensors(file)
        assert found.keys() == right.keys()
        for name, value in right.items():
            assert found[name].numpy().tobytes() == value.numpy().tobytes(), (file.name, name)
    wrong = f"lambda.publish.base={tmp_path}"
    with pytest.raises(UserError, match="is no package"):
        told(tmp_path / "wrong", *words(clicks, EFFECTS, *publishes, wrong))


class Learning:
    """A server that learns, and is killed."""

    def __init__(self, package: Path, folder: Path, store: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        folder.mkdir()
        (folder / "token").write_text(TOKEN)
        options = f"token={folder / 'token'}", f"learnt={folder / 'learnt'}", "learn_seconds=0"
        self.command = [sys.executable, "-m", "recpipe", "serve", str(package), f"port={self.port}", "name=m"]
        self.command += ["learn=true", *options, f"learn_store={store}"]
        self.folder = folder
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        while True:
            with suppress(OSError), connected(self.port) as connection:
                connection.request("GET", "/v2/health/ready")
                if connection.getresponse().status == 200:
                    return
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """As if the machine had lost it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def post(self, body: bytes) -> dict[str, Any]:
        """Have a body's events learnt; OSError if the server is not there."""
        with connected(self.port) as connection:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            connection.request("POST", "/v2/models/m/learn", body, headers)
            response = connection.getresponse()
            found = json.loads(response.read())
            assert response.status == 200, found
            return found

    def stop(self) -> Path:
        """Stop it; where it has kept what it learnt."""
        self.process.terminate()
        assert self.process.wait() == 0
        (directory,) = (self.folder / "learnt").iterdir()
        return newest_effects(directory)[0]


@contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        yield connection
    except http.client.HTTPException as fault:
        raise OSError(str(fault)) from fault
    finally:
        connection.close()


def bodies() -> list[bytes]:
    draw, made = np.random.default_rng(5), []
    for number in range(BODIES):
        inputs = [
            {
                "name": "dense",
                "datatype": "FP32",
                "shape": [EVENTS, 1],
                "data": draw.normal(size=EVENTS).tolist(),
            },
            *(
                {
                    "name": name,
                    "datatype": "INT64",
                    "shape": [EVENTS],
                    "data": draw.integers(0, most, EVENTS).tolist(),
                }
                for name, most in (("user", 50), ("item", 20))
            ),
        ]
        events = [{"id": f"{number}.{n}", "label": int(draw.integers(0, 2))} for n in range(EVENTS)]
        made.append(json.dumps({"inputs": inputs, "events": events}).encode())
    return made


def post(server: Learning, body: bytes) -> None:
    """Post a body whose answer may not come."""
    with suppress(OSError, ValueError):
        server.post(body)


def test_a_server_that_is_killed_while_it_learns_has_learnt_each_event_once(
    clicks: Path, tmp_path: Path
) -> None:
    """After 20 kills its coefficients have the bits of a server's that was never killed."""
    fresh = tmp_path / "fresh"
    told(tmp_path / "run", *words(clicks, EFFECTS, f"lambda.publish.dir={fresh}"))
    package = fresh / "base.recpipe"
    assert newest_effects(package / "effects")[1].number == 0, "of nothing that is learnt"
    assert [*deltas_in(fresh)] == [1]
    every, draw = bodies(), random.Random(0)
    whole = Learning(package, tmp_path / "whole", "host")
    for body in every:
        whole.post(body)
    wanted = whole.stop()
    killed, kills, at = Learning(package, tmp_path / "killed", "ssd"), 0, 0
    sent = 0
    due = time.monotonic() + draw.random()
    while at < len(every) or kills < KILLS:
        if kills < KILLS and (time.monotonic() >= due or at == len(every)):
            # In the middle of a body, which nobody waits for.
            other = threading.Thread(target=post, args=(killed, every[min(at, len(every) - 1)]))
            other.start()
            time.sleep(draw.random() * 0.02)
            killed.kill()
            other.join()
            kills += 1
            killed.start()
            due = time.monotonic() + draw.random() * 0.3
            at = max(0, at - 2)  # what was answered is on disk; who does not know that sends it again
        if at < len(every):
            found = killed.post(every[at])
            assert found["learnt"] in (0, EVENTS)
            assert found["saved"] == found["total"]
            sent, at = sent + 1, at + 1
    assert found["total"] == BODIES * EVENTS
    assert sent > BODIES
    mine = killed.stop()
    for file in wanted.iterdir():
        if file.suffix != ".json":
            assert (mine / file.name).read_bytes() == file.read_bytes(), file.name
