"""A served package that follows deltas: no answer is of two versions, versions come back, and a gate."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_serve.batching.forms import Asked, Form, together
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.config import ServeConfig, serve_config
from recpipe_serve.errors import Refused
from recpipe_serve.fresh.follower import Follower, catch_up, wanted_version
from recpipe_serve.fresh.gate import Recent
from recpipe_serve.fresh.reading import DeltaReader, ReadDelta, ReaderProcess, serve
from recpipe_serve.fresh.versions import Kept, Versions
from recpipe_serve.tests.clients import Clients, children

import recpipe
from recpipe.answers import score
from recpipe.answers.apply import apply_deltas
from recpipe.answers.delta import Change, Delta, Version, write_delta
from recpipe.answers.manifest import read_manifest
from recpipe.answers.score import Scorer
from recpipe.errors import UserError
from recpipe.private_api.compiled import compiler
from tests import processes

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.http.app import Server

pytestmark = pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here")
WORDS = (
    "data.samples=600",
    "data.batch_size=128",
    "data.tables={a: 300, b/c: 80, d.e: 60}",
    "data.pooling=[1, 3, 1]",
    "model.bottom=[16]",
    "model.top=[16]",
    "trainer.device=cpu",
    "trainer.logger=null",
    "trainer.max_steps=2",
)
DELTAS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    recpipe.train(None, None, *WORDS, output=folder / "run", quiet=True).close()
    return recpipe.package(folder / "run", folder / "base.recpipe", reference=False, quiet=True)


def made_up(base: Path, folder: Path, before: Version, seed: int, size: float = 0.5, **told: Any) -> Delta:
    """A delta of many rows and all parameters, which moves every score."""
    draw, manifest = np.random.default_rng(seed), read_manifest(base)
    rows = {}
    for name, about in manifest["tables"].items():
        ids = np.sort(draw.choice(about["rows"], about["rows"] * 3 // 4, replace=False))
        values = draw.normal(size=(len(ids), about["dimension"])).astype(np.float32)
        rows[name] = ids, "fp32", torch.from_numpy(values * size).view(torch.uint8)
    dense = {
        name: value + size * torch.from_numpy(draw.normal(size=value.shape).astype(np.float32))
        for name, value in score.tensors(base / "dense.safetensors").items()
        if value.is_floating_point()
    }
    change = Change(before.step + 1, time.time(), time.time(), rows, {}, dense, **told)
    return write_delta(folder, before, change)


@pytest.fixture(scope="module")
def deltas(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, version = tmp_path_factory.mktemp("deltas"), Version.of_package(base, read_manifest(base))
    for seed in range(DELTAS):
        version = made_up(base, folder, version, seed).version
    return folder


@pytest.fixture(scope="module")
def packages(base: Path, deltas: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of each version."""
    folder, made = tmp_path_factory.mktemp("packages"), [base]
    for number in range(1, DELTAS + 1):
        made.append(folder / str(number))
        apply_deltas(made[-2], [deltas / f"delta-{number:08d}"], made[-1])
    return made


def requests(base: Path, count: int, samples: int = 5) -> list[Asked]:
    draw, sparse = np.random.default_rng(1), read_manifest(base)["sparse"]
    form, made = Form(samples, [samples] * len(sparse), [2] * len(sparse)), []
    for _ in range(count):
        ids = np.concatenate([draw.integers(0, f["rows"], 2 * samples) for f in sparse])
        made.append(Asked(draw.normal(size=(samples, 13)).astype(np.float32), ids, form))
    return made


def read(versions: Versions, directory: Path) -> ReadDelta:
    return versions.reader(DeltaReader, None).read(directory)


def scores_of(scorers: Sequence[Scorer], asked: Sequence[Asked]) -> list[torch.Tensor]:
    """By version the scores of all requests at once."""
    return [RequestScorer(scorer)(*together(asked)) for scorer in scorers]


def test_each_version_has_the_bits_of_its_package_forwards_and_backwards(
    base: Path, deltas: Path, packages: list[Path]
) -> None:
    versions, asked = Versions(base, 8), requests(base, 3)
    known = scores_of([Scorer(package, mapped=True) for package in packages], asked)
    assert all(not torch.equal(one, other) for n, one in enumerate(known) for other in known[:n])
    for number in range(1, DELTAS + 1):
        versions.add(read(versions, deltas / f"delta-{number:08d}"))
        assert torch.equal(*scores_of([versions.answering], asked), known[number - 1]), "it still answers"
        assert versions.changed(number - 1, number) is None, "its dense part is another one"
        versions.swap()
        assert torch.equal(*scores_of([versions.answering], asked), known[number])
    for number in (0, 3, 1, DELTAS):
        versions.move(number)
        versions.swap()
        assert torch.equal(*scores_of([versions.answering], asked), known[number])
    files = [file for file in base.rglob("*") if file.is_file()]
    assert files, "the package itself is as it was"
    score.verified(base)


def test_of_deltas_with_rows_alone_it_is_known_which_features_have_others(base: Path, tmp_path: Path) -> None:
    version, manifest = Version.of_package(base, read_manifest(base)), read_manifest(base)
    versions = Versions(base, 8)
    for ids in ([3, 7], [7, 40]):
        rows = torch.zeros(2, 4 * manifest["tables"]["a"]["dimension"], dtype=torch.uint8)
        change = Change(version.step + 1, 0.0, 0.0, {"a": (np.array(ids), "fp32", rows)}, {}, {})
        delta = write_delta(tmp_path, version, change)
        version = delta.version
        versions.add(read(versions, delta.directory))
    versions.swap()
    (place,) = [n for n, own in enumerate(manifest["sparse"]) if own["name"] == "a"]
    changed = versions.changed(0, 2)
    assert changed is not None
    assert {own: ids.tolist() for own, ids in changed.items()} == {place: [3, 7, 40]}
    assert versions.changed(2, 1) is None, "of what is undone all may be other"


def test_versions_that_are_too_many_go_and_the_rest_are_as_they_were(
    base: Path, deltas: Path, packages: list[Path]
) -> None:
    versions, asked = Versions(base, 3), requests(base, 2)
    catch_up(versions, deltas, None)
    assert [one.of.sequence for one in versions.kept] == [DELTAS - 2, DELTAS - 1, DELTAS]
    known = scores_of([Scorer(package, mapped=True) for package in packages[-3:]], asked)
    for place in (0, 2, 1):
        versions.move(place)
        versions.swap()
        assert torch.equal(*scores_of([versions.answering], asked), known[place])
    with pytest.raises(UserError, match="and 4 is there already"):
        versions.add(read(versions, deltas / "delta-00000001"))


class Served:
    """A server of ``base`` that follows ``folder``, without sockets."""

    def __init__(self, base: Path, folder: Path, **words: Any) -> None:
        config = ServeConfig(follow=str(folder), **words)
        versions = Versions(base, config.versions)
        manifest = versions.answering.manifest
        self.server = Server(RequestScorer(versions.answering), manifest, "m", config)
        self.follower = Follower(config, versions, {"score": "clicks"}, self._use, self._drained)
        self.server.follow(self.follower)

    def _use(self, scorer: RequestScorer, package: str, changed: object) -> None:
        self.server.use(scorer, self.server.manifest, package)

    def _drained(self) -> asyncio.Future[None]:
        return self.server.batcher.drained()

    async def ask(self, asked: Asked, ident: str | None = None) -> torch.Tensor:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.server.batcher.put(replace(asked), done.set_result)
        found = await done
        assert not isinstance(found, Exception), found
        self.follower.recent.keep(ident, asked, found.reshape(len(found), -1))
        return torch.from_numpy(found)


@pytest.mark.parametrize("by_thread", [False, True])
def test_no_answer_is_of_two_versions(
    base: Path, deltas: Path, packages: list[Path], by_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While deltas come, each request is scored as one package does; also in the thread for long batches."""
    if by_thread:
        monkeypatch.setattr("recpipe_serve.batching.batcher.SOON", -1.0)
    asked = requests(base, 4)
    scorers = [Scorer(package, mapped=True) for package in packages]
    known = [scores_of(scorers, [one]) for one in asked]

    async def run() -> list[list[int]]:
        served = Served(base, deltas)
        served.server.batcher.start()
        by: list[list[int]] = [[] for _ in asked]
        done = asyncio.Event()

        async def client(number: int) -> None:
            while not done.is_set():
                found = await served.ask(asked[number])
                near = [(found - own).abs().max() < 1e-5 for own in known[number]]
                assert sum(near) == 1, "it is of one version"
                by[number].append(near.index(True))
                await asyncio.sleep(0)

        clients = [asyncio.create_task(client(number)) for number in range(len(asked))]
        await asyncio.sleep(0.02)
        while await served.follower.look():
            await asyncio.sleep(0.02)
        done.set()
        await asyncio.gather(*clients)
        await served.server.batcher.close()
        assert served.follower.counts.taken == DELTAS
        return by

    for own in asyncio.run(run()):
        assert own == sorted(own), "a version that was left does not come back"
        assert set(own) >= {0, DELTAS}


def test_going_back_stays_there_until_it_is_told_to_follow(base: Path, deltas: Path, tmp_path: Path) -> None:
    async def run() -> None:
        served = Served(base, deltas, rollback=True)
        served.server.batcher.start()
        follower = served.follower
        for _ in range(3):
            await follower.look()
        await follower.go_to(1)
        assert follower.told()["answering"] == 1
        assert not follower.told()["following"]
        with pytest.raises(Refused, match="version 9 is not kept; there are 0, 1, 2, 3"):
            await follower.go_to(9)
        await follower.go_to(None)
        assert follower.told()["answering"] == DELTAS, "also what came meanwhile"
        assert follower.told()["following"]
        assert follower.figures()["delta"] == DELTAS
        await served.server.batcher.close()

    asyncio.run(run())
    assert wanted_version({"sequence": 2}) == 2
    assert wanted_version({"follow": True}) is None
    for wrong in ({}, [], {"sequence": "2"}, {"sequence": True}, {"follow": 1, "sequence": 2}):
        with pytest.raises(Refused):
            wanted_version(wrong)


def test_a_gate_holds_back_what_scores_otherwise_and_takes_it_with_what_mends_it(
    base: Path, tmp_path: Path
) -> None:
    first = Version.of_package(base, read_manifest(base))
    wild = made_up(base, tmp_path, first, 1, size=5.0)

    async def run() -> None:
        served = Served(base, tmp_path, gate_drift=0.2, gate_samples=100)
        served.server.batcher.start()
        for one in requests(base, 60):
            await served.ask(one)
        assert await served.follower.look()
        assert served.follower.told()["answering"] == 0
        (*_, held) = served.follower.told()["versions"]
        assert "drift from what was answered: PSI" in held["refused"]
        # The next one brings everything back to what the base has.
        tables = {name: score.tensors(base / t["file"]) for name, t in read_manifest(base)["tables"].items()}
        rows = {n: (np.arange(len(t["rows"])), "fp32", t["rows"].clone()) for n, t in tables.items()}
        dense = {name: v.clone() for name, v in score.tensors(base / "dense.safetensors").items()}
        write_delta(tmp_path, wild.version, Change(9, time.time(), time.time(), rows, {}, dense))
        assert await served.follower.look()
        assert served.follower.told()["answering"] == 2
        await served.server.batcher.close()

    asyncio.run(run())


def test_a_gate_judges_by_labels_and_by_trainings_own_figures(base: Path, tmp_path: Path) -> None:
    first = Version.of_package(base, read_manifest(base))
    told = {"": {"ne": 0.80}}, {"": {"ne": 0.95}}
    one = made_up(base, tmp_path, first, 1, size=0.0, progressive=told[0])
    made_up(base, tmp_path, one.version, 2, size=0.0, progressive=told[1])

    async def run() -> None:
        served = Served(base, tmp_path, gate_ne=0.05, gate_calibration=0.1, gate_samples=100)
        served.server.batcher.start()
        await served.follower.look()
        assert served.follower.told()["answering"] == 1
        await served.follower.look()
        assert served.follower.told()["answering"] == 1
        assert "training's NE is 0.95, and was 0.8" in served.follower.versions.kept[-1].refused
        await served.server.batcher.close()

    asyncio.run(run())
    other = tmp_path / "other"
    other.mkdir()
    made_up(base, other, first, 3, size=3.0)

    async def labelled() -> None:
        served = Served(base, other, gate_ne=0.05, gate_samples=100)
        served.server.batcher.start()
        for number, asked in enumerate(requests(base, 60)):
            found = await served.ask(asked, f"r{number}")
            labels = (found > found.median()).float().tolist()
            served.follower.labelled([{"id": f"r{number}", "label": labels}], {"score": "clicks"})
        await served.follower.look()
        assert served.follower.told()["answering"] == 0
        assert "labelled samples is" in served.follower.versions.kept[-1].refused
        await served.server.batcher.close()

    asyncio.run(labelled())


def test_a_gate_holds_back_what_is_not_calibrated_to_the_labels(base: Path, tmp_path: Path) -> None:
    """Labels are drawn by the base's own predictions; the second version has other biases, the first not."""
    version, rng = Version.of_package(base, read_manifest(base)), np.random.default_rng(0)
    for more in (0.0, 2.0):
        dense = {
            name: value + (more if name.endswith("bias") else 0.0)
            for name, value in score.tensors(base / "dense.safetensors").items()
            if value.is_floating_point()
        }
        change = Change(version.step + 1, time.time(), time.time(), {}, {}, dense)
        version = write_delta(tmp_path, version, change).version

    async def run() -> None:
        served = Served(base, tmp_path, gate_calibration=0.25, gate_samples=100)
        served.server.batcher.start()
        for number, asked in enumerate(requests(base, 60)):
            found = await served.ask(asked, f"r{number}")
            labels = (rng.random(len(found)) < found.sigmoid().numpy()).astype(float).tolist()
            served.follower.labelled([{"id": f"r{number}", "label": labels}], {"score": "clicks"})
        await served.follower.look()
        assert served.follower.told()["answering"] == 1
        await served.follower.look()
        assert served.follower.told()["answering"] == 1
        assert "calibration of 'score' on the last 300 labelled" in served.follower.versions.kept[-1].refused
        await served.server.batcher.close()

    asyncio.run(run())


def test_what_is_recent_is_bounded() -> None:
    recent, asked = Recent(12), object()
    for number in range(10):
        recent.keep(f"r{number}", asked, np.zeros((5, 1), np.float32))  # type: ignore[arg-type]
    assert len(recent.all()) == 2
    recent.label("r0", np.ones((5, 1), np.float32))
    recent.label("r9", np.ones((5, 1), np.float32))
    assert [one.labels is None for one in recent.all()] == [True, False]


def test_damaged_and_foreign_deltas_are_refused_and_the_version_before_answers(
    base: Path, deltas: Path, packages: list[Path], tmp_path: Path
) -> None:
    async def refused(folder: Path) -> str:
        served = Served(base, folder)
        served.server.batcher.start()
        task = asyncio.create_task(served.follower.run())
        served.follower.config.poll_seconds = 0.01
        while served.follower.told()["fault"] is None:
            await asyncio.sleep(0.01)
        task.cancel()
        await served.server.batcher.close()
        assert served.follower.told()["answering"] == 0
        return str(served.follower.told()["fault"])

    version = Version("f" * 64, 0, "f" * 64, 1)
    made_up(base, tmp_path, version, 1)
    assert "is of another package" in asyncio.run(refused(tmp_path))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    found = made_up(base, damaged, Version.of_package(base, read_manifest(base)), 1)
    (found.directory / "rows" / "a.safetensors").write_bytes(b"")
    assert "is not as it was written" in asyncio.run(refused(damaged))


class Forked(ReaderProcess):
    """Its process is forked from one that has done the imports."""

    def _start(self) -> socket.socket:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.forked = processes.server().Process(target=serve, args=(its, self._told))
            self.forked.start()
        assert self.forked.pid is not None
        self._process = Started(self.forked)  # type: ignore[assignment]
        return mine


class Started:
    """What ``ReaderProcess`` asks of its process."""

    def __init__(self, process: Any) -> None:
        self.process, self.pid = process, process.pid

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        self.process.join()
        return int(self.process.exitcode)


def test_a_process_reads_what_is_read_here_refuses_the_same_and_is_started_again(
    base: Path, deltas: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    versions, directory = Versions(base, 8), deltas / "delta-00000001"
    reader, here = versions.reader(Forked, None), versions.reader(DeltaReader, None)
    one, other = reader.read(directory), here.read(directory)
    assert one.of == other.of
    for kind in ("rows", "ids"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        assert list(mine) == list(theirs)
        assert all(map(torch.equal, chain(*mine.values()), chain(*theirs.values())))
    assert one.rows
    assert one.dense.keys() == other.dense.keys()
    assert all(torch.equal(value, other.dense[name]) for name, value in one.dense.items())
    damaged = Path(shutil.copytree(directory, tmp_path / directory.name))
    (damaged / "dense.safetensors").unlink()
    for each in (reader, here):
        with pytest.raises(UserError, match="dense.safetensors is missing"):
            each.read(damaged)
    os.kill(reader.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert reader.read(directory).of == other.of
    assert "was killed by signal 9; it is started again" in caplog.text
    reader.close()
    with pytest.raises(UserError, match="read no longer"):
        reader.read(directory)


def test_an_age_is_not_changed_by_a_clock_that_jumps(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(Version.of_package(base, read_manifest(base)), time.time() - 5)
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert 5 <= kept.seconds_old < 60
    assert Kept(kept.of, 1e12).seconds_old < 60, "written by a clock that is ahead"


def test_words_of_following() -> None:
    assert serve_config(["follow=d", "versions=3", "gate_ne=0.01"]).gate_ne == 0.01
    with pytest.raises(UserError, match="versions"):
        serve_config(["versions=1"])
    assert json.loads(json.dumps(serve_config([]).gate_drift)) is None


@pytest.mark.soak  # test_workers holds what supervisor and workers say to each other
@pytest.mark.slow
def test_all_workers_go_back_together_and_one_that_starts_again_is_there(
    base: Path, deltas: Path, packages: list[Path], tmp_path: Path
) -> None:
    words = ("port=0", "workers=2", f"follow={deltas}", "poll_seconds=0.05", "rollback=true", "name=m")
    words += ("deadline_ms=60000",)  # on a busy machine requests wait
    server = processes.Child(tmp_path / "server", "serve", str(base), *words, merged=True)

    def require(number: int) -> None:
        """All connections, of which each worker has some, are answered by this version alone."""
        with Clients(address, [Scorer(packages[number], mapped=True)]).asking() as clients:
            while clients.by[0] < 40 and not clients.wrong:
                time.sleep(0.02)
        assert not clients.wrong, (number, clients.wrong[:3])

    def go_to(content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked = urllib.request.Request(f"{address}/deltas", json.dumps(content).encode())
        try:
            # A worker that was started again first reads what it has not, by a process of low priority.
            with urllib.request.urlopen(asked, timeout=processes.SECONDS) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read())

    try:
        found = re.search(r"at (http\S+/v2/models/m); 2 workers", server.until("golden"))
        assert found is not None
        address = found[1]
        require(DELTAS)
        status, told = go_to({"sequence": 1})
        assert (status, told["answering"], told["following"]) == (200, 1, False)
        require(1)
        status, told = go_to({"sequence": 9})
        assert (status, "version 9 is not kept" in told["error"]) == (400, True)
        require(1)
        workers = children(server.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        require(1)
        server.until("answers again")
        require(1)
        status, told = go_to({"follow": True})
        assert (status, told["answering"], told["following"]) == (200, DELTAS, True)
        require(DELTAS)
        server.send(signal.SIGTERM)
        assert server.ended().returncode == 0
    finally:
        server.kill()
