"""kill -9 of the broker, who trains and publishes, who serves, who reads for it and who applies, at random.

In the batch path each event is used once: a checkpoint has the position behind the last event that was
trained, so that a run which is killed goes on as if it had not been, and what is published ends as what a run
publishes that nobody has killed, bit by bit. Events that are posted to a server (``learn``) have ids and are
learnt once, however often they are sent (``recpipe_lambda_learner.tests.test_effects`` kills that).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_serve.tests.clients import children

import recpipe
from recpipe.answers import score
from recpipe.answers.apply import apply_deltas
from recpipe.answers.delta import Version, deltas_in, following
from recpipe.answers.manifest import read_manifest
from recpipe.checkpoint.table_io import newest
from recpipe.private_api.compiled import compiler
from tests.answers.test_clicks import BATCH, FEATURES, WORDS, record
from tests.answers.test_deltas import differences
from tests.processes import Child

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here"),
]
KILLS = int(os.environ.get("RECPIPE_KILLS", "50"))
STEPS = 8 * KILLS


class Broker:
    """A Redis server that has what it took on the disk before it says so."""

    def __init__(self, folder: Path) -> None:
        self.redis = pytest.importorskip("redis", reason="needs redis")
        if shutil.which("redis-server") is None:
            pytest.skip("needs redis-server")
        self.place = folder / "redis.sock"
        own = ["--port", "0", "--unixsocket", str(self.place), "--dir", str(folder), "--save", ""]
        self.command = ["redis-server", *own, "--appendonly", "yes", "--appendfsync", "always"]
        self.start()

    def start(self) -> None:
        self.place.unlink(missing_ok=True)
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        until(self._there)

    def _there(self) -> bool:
        try:
            return bool(self.redis.Redis.from_url(f"unix://{self.place}").ping())
        except self.redis.RedisError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def send(self, number: int, content: bytes) -> None:
        """Add an entry, once: it has a number, and one that is there already is not taken again."""
        while True:
            try:
                client = self.redis.Redis.from_url(f"unix://{self.place}")
                client.xadd("clicks", {"record": content}, id=f"{1000 + number}-{number}")
                return
            except self.redis.ResponseError as fault:
                if "equal or smaller" in str(fault):
                    return
                time.sleep(0.05)  # it is loading what it has
            except self.redis.RedisError:
                time.sleep(0.05)


def until(there: Callable[[], Any], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


class System:
    """All of it, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fresh = folder, folder / "fresh"
        (folder / "f.yaml").write_text(json.dumps(FEATURES))
        self.broker = Broker(folder)
        self.training: Child | None = None
        self.server: Child | None = None
        self.applying: Child | None = None
        self.address, self.kills = "", 0
        self.faults: list[str] = []

    @property
    def words(self) -> tuple[str, ...]:
        source = (
            "data=stream",
            "data.source=redis",
            "data.topic=clicks",
            f"data.features={self.folder}/f.yaml",
        )
        return (*source, f"data.servers='unix://{self.broker.place}'", *WORDS, f"trainer.max_steps={STEPS}")

    def train(self) -> None:
        """Begin, or go on after the newest checkpoint."""
        own = [f"trainer.publish={{dir: {self.fresh}, every_steps: 3}}", "trainer.checkpoint_every=5"]
        if any((self.folder / "run" / "checkpoints").glob("*.ckpt")):
            own.append(f"resume={self.folder}/run/checkpoints")
        own += [f"hydra.run.dir={self.folder}/run", "overwrite=true"]
        self.training = Child(self.folder / "training", *self.words, *own, merged=True)

    def serve(self) -> None:
        words = ("serve", f"{self.fresh}/base.recpipe", "port=0", f"follow={self.fresh}", "poll_seconds=0.05")
        self.server = Child(self.folder / "server", *words, merged=True)
        found = re.search(r"at (http\S+/v2/models/base);", self.server.until("golden"))
        assert found is not None
        self.address = found[1]

    def apply(self) -> None:
        self.applying = Child(self.folder / "applying", "apply", f"{self.folder}/copy", str(self.fresh))

    def score(self, user: int) -> float:
        body = json.dumps({"rows": [{"user": user, "item": "i1", "price": 0.5}]}).encode()
        with urllib.request.urlopen(f"{self.address}/infer", body, timeout=30) as answer:
            return float(json.loads(answer.read())["outputs"][0]["data"][0])

    def ask(self, stop: threading.Event) -> None:
        """Requests, all the time: each is answered, or its server is gone."""
        while not stop.wait(0.03):
            try:
                self.score(1)
            except urllib.error.HTTPError as fault:
                self.faults.append(str(fault))
            except (OSError, ValueError):
                pass

    def kill(self, what: str) -> bool:
        """Whether it ran when it was killed; it is started again."""
        if what == "broker":
            self.broker.kill()
            self.broker.start()
            return True
        if what == "reader":
            assert self.server is not None
            found = children(self.server.pid)
            for pid in found:
                os.kill(pid, 9)
            return bool(found)
        child = {"training": self.training, "server": self.server, "applying": self.applying}[what]
        assert child is not None
        ran = child.process.is_alive()
        child.kill()
        return ran

    def go_on(self) -> None:
        """Start again what has ended."""
        assert self.training is not None
        assert self.server is not None
        assert self.applying is not None
        if not self.training.process.is_alive() and self.step < STEPS:
            self.train()
        if not self.server.process.is_alive():
            self.serve()
        if not self.applying.process.is_alive():
            self.apply()

    @property
    def step(self) -> int:
        """Of the latest delta."""
        found = deltas_in(self.fresh)
        return int(json.loads((max(found.values()) / "delta.json").read_text())["step"]) if found else 0

    def end(self) -> None:
        for child in (self.training, self.server, self.applying):
            if child is not None:
                child.kill()
        self.broker.kill()


def test_whatever_is_killed_each_event_is_trained_once_and_no_version_is_torn(tmp_path: Path) -> None:
    draw, events = random.Random(0), np.random.default_rng(0)
    drawn = events.integers(0, [300, 100, 2], (STEPS * BATCH, 3)).tolist()
    system, stop, killed = System(tmp_path), threading.Event(), Counter[str]()

    def produce() -> None:
        for number, one in enumerate(drawn):
            system.broker.send(number, record(*one))
            while number > BATCH * (STEPS // KILLS) * (system.kills + 2) and not stop.wait(0.05):
                pass  # so that somebody trains at each kill

    sending = threading.Thread(target=produce)
    asking = threading.Thread(target=system.ask, args=(stop,))
    try:
        sending.start()
        system.train()
        until(lambda: deltas_in(system.fresh) if system.fresh.is_dir() else False)
        base = system.fresh / "base.recpipe"
        copy, version = (
            Path(shutil.copytree(base, tmp_path / "copy")),
            Version.of_package(base, read_manifest(base)),
        )
        system.serve()
        system.apply()
        asking.start()
        for number in range(KILLS):
            what = ("training", "server", "reader", "applying", "broker")[number % 5]
            time.sleep(draw.uniform(0, 1.5))
            if what == "applying":
                system.apply()
                time.sleep(draw.uniform(0, 0.2))
            killed[what] += system.kill(what)
            system.kills += 1
            found = list(following(system.fresh, version))
            assert len(found) >= len(deltas_in(system.fresh)) - 1, "all but one that has just come"
            score.verified(copy)
            system.go_on()
        sending.join()
        until(lambda: system.go_on() or system.step == STEPS, 600)
        until(lambda: not system.training.process.is_alive())  # type: ignore[union-attr]
        assert min(killed.values()) > 0, killed
        assert len(killed) == 5
        assert not system.faults, system.faults[:3]
        apply_deltas(base, [system.fresh], tmp_path / "made")
        until(lambda: _answering(system) == len(deltas_in(system.fresh)))
        _require_answers_of(system, tmp_path / "made")
        # The same events, and nobody is killed.
        alone = Child(
            tmp_path / "alone",
            *system.words,
            f"trainer.checkpoint_every={STEPS}",
            f"hydra.run.dir={tmp_path}/one",
        )
        assert alone.ended().returncode == 0
        whole = recpipe.package(newest(tmp_path / "one"), tmp_path / "whole", reference=False, quiet=True)
        assert not differences(tmp_path / "made", whole)
        print(f"killed {dict(killed)}; {len(deltas_in(system.fresh))} deltas to step {STEPS}")
    finally:
        stop.set()
        system.broker.start() if system.broker.process.poll() is not None else None
        sending.join()
        if asking.is_alive():
            asking.join()
        system.end()


def _answering(system: System) -> int:
    with urllib.request.urlopen(f"{system.address}/deltas", timeout=30) as answer:
        return int(json.loads(answer.read())["answering"])


def _require_answers_of(system: System, package: Path) -> None:
    """The server answers as ``package`` does."""
    from recpipe_serve.batching.forms import together
    from recpipe_serve.batching.scorer import RequestScorer
    from recpipe_serve.http.features import Features
    from recpipe_serve.http.raw import RawValues

    from recpipe.answers.encoded import read_encoding

    scorer = score.Scorer(package)
    encoding = read_encoding(package, scorer.manifest)
    assert encoding is not None
    for user in range(5):
        inputs = RawValues(encoding).inputs([{"user": user, "item": "i1", "price": 0.5}])
        asked = Features(scorer.manifest, 10, scorer.maps).asked(inputs)
        wanted = RequestScorer(scorer)(*together([asked]))
        torch.testing.assert_close(system.score(user), float(wanted[0]), rtol=0, atol=1e-6)
