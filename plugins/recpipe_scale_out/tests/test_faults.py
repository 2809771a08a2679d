"""Faults under load: every answer is compared, bit by bit, with the right one of its version.

    python -m pytest -n 0 -s -m soak plugins/recpipe_scale_out/tests/test_faults.py

says for each of them how many answers were right, wrong, partial, refused, and lost.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from recpipe_scale_out.command import cut
from recpipe_scale_out.config import CutConfig
from recpipe_scale_out.cutting import MAIN, shard_folder
from recpipe_scale_out.tests.fleets import Fleet, Load, fleet, free_port, packaged
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.tests.clients import children

from recpipe.answers.score import Scorer
from recpipe.private_api.compiled import compiler

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")
pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")

pytestmark = pytest.mark.soak
OLD, NEW = 0, 1
SHARDS = 2
CONNECTED = 3.0
"""Seconds in which a main server is connected with a shard again; minReadySeconds has Kubernetes wait."""
RUN = "from recpipe.cli import program\nprogram()\n"
ANY_VERSION = f"""
from recpipe_scale_out import serving
find = serving.ShardModels.find
serving.ShardModels.find = lambda self, name, version="": find(self, name)
{RUN}"""
"""A shard that does not look at the version that it is asked for."""
TAKES_ALL = f"""
import grpc
from recpipe_scale_out import calls
calls._fault = lambda asked, call: None if call.code() == grpc.StatusCode.OK else "it failed"
{RUN}"""
"""A main server that does not look at the version that has answered."""
INSIDE = f"""
import ctypes, os
if ctypes.CDLL(None, use_errno=True).setns(os.open("/run/netns/%s", os.O_RDONLY), 0x40000000):
    raise OSError(ctypes.get_errno(), "setns")
{RUN}"""
"""A process in a network of its own."""


class Cuts:
    """Two versions of a package, whole and cut alike."""

    def __init__(self, folder: Path) -> None:
        packages = [packaged(folder, steps) for steps in (2, 4)]
        self.places = folder / "old", folder / "new"
        cut(packages[OLD], self.places[OLD], CutConfig(SHARDS, overlap=False))
        plan = str(self.places[OLD] / "plan.json")
        cut(packages[NEW], self.places[NEW], CutConfig(SHARDS, plan=plan, overlap=False))
        self.versions = [RequestScorer(Scorer(package)) for package in packages]

    @contextmanager
    def load(self, own: Fleet, count: int = 4) -> Iterator[Load]:
        """Clients of ``own`` in the block."""
        with Load([own.host], own.path, self.versions, count).asking() as asking:
            asking.more("right", 50)
            yield asking


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Cuts:
    if compiler() is None:
        pytest.skip("a package is compiled, and there is no C++ compiler here")
    return Cuts(tmp_path_factory.mktemp("cuts"))


def test_killed_shards_cost_refusals_and_never_a_wrong_answer(cuts: Cuts, tmp_path: Path) -> None:
    with fleet(cuts.places[OLD], tmp_path, SHARDS, "batch=1") as own, cuts.load(own) as load:
        for number in (0, 1, 0, 1):
            own.shards[number].kill()
            load.more("refused", 10)
            own.shards[number] = own.shard(number)
            load.more("right", 100)
    assert set(load.found) == {"refused"}
    assert all("does not answer" in why for why in load.why)


def test_a_killed_replica_costs_nothing(cuts: Cuts, tmp_path: Path) -> None:
    with fleet(cuts.places[OLD], tmp_path, SHARDS, "batch=1", replicas=2) as own, cuts.load(own) as load:
        for number in (0, 3, 1, 2):
            own.shards[number].kill()
            load.more("right", 100)
            own.shards[number] = own.shard(number)
            own.shards[number].until("serving shard")
            load.more("right", 100)
        assert own.figure("shards_failed") > 0
    assert not load.found


def test_a_killed_main_server_loses_what_it_had_and_comes_back(cuts: Cuts, tmp_path: Path) -> None:
    with fleet(cuts.places[OLD], tmp_path, SHARDS, "batch=1") as own, cuts.load(own) as load:
        for _ in range(2):
            own.main.kill()
            own.main = own.begin_main(own.port)
            load.more("right", 100)
    assert set(load.found) <= {"lost", "not taken"}
    assert load.found["lost"] <= 2 * load.count


def test_a_killed_worker_of_two_loses_what_it_had(cuts: Cuts, tmp_path: Path) -> None:
    words = ("batch=1", "workers=2")
    with fleet(cuts.places[OLD], tmp_path, SHARDS, *words) as own, cuts.load(own) as load:
        before = own.figure("shards_calls")
        for child in children(own.main.pid):
            os.kill(child, signal.SIGKILL)
            load.more("right", 200)
            own.main.until("answers again")
        assert own.figure("shards_calls") > before, "what a dead worker has counted stays in the sum"
    assert set(load.found) <= {"lost", "not taken"}
    assert load.found["lost"] <= 2 * load.count


@pytest.mark.parametrize("policy", ["error", "default_row"])
def test_a_stopped_shard_is_waited_for_once(cuts: Cuts, tmp_path: Path, policy: str) -> None:
    """Others are answered at once until it says again that it is ready."""
    words = ("batch=1", "shards_ms=300", f"shards_lost={policy}")
    what = "refused" if policy == "error" else "partial"
    with fleet(cuts.places[OLD], tmp_path, SHARDS, *words) as own, cuts.load(own) as load:
        for _ in range(2):
            own.shards[1].send(signal.SIGSTOP)
            load.more(what, 400)
            own.shards[1].send(signal.SIGCONT)
            load.more("right", 200)
        late, lost = own.figure("shards_late"), own.figure("shards_lost")
    assert set(load.found) == {what}
    assert lost >= 800
    assert late <= 10


def test_a_stopped_replica_costs_a_wait_alone(cuts: Cuts, tmp_path: Path) -> None:
    words = ("batch=1", "shards_hedge_ms=50", "shards_ms=2000")
    with fleet(cuts.places[OLD], tmp_path, SHARDS, *words, replicas=2) as own, cuts.load(own) as load:
        own.shards[1].send(signal.SIGSTOP)
        load.more("right", 400)
        own.shards[1].send(signal.SIGCONT)
        load.more("right", 100)
        assert own.figure("shards_hedged") > 0
    assert not load.found


@contextmanager
def network(number: int) -> Iterator[tuple[str, str, list[str]]]:
    """A network of its own on a wire to this one: its name, an address in it, and the words before which a
    command acts on its end of the wire. Skips the test where that may not be made."""
    name, ends = f"recpipe{os.getpid()}", [f"rp{os.getpid()}{side}" for side in "ab"]
    here, there = (f"10.213.{number}.{host}" for host in (1, 2))
    inside = ["ip", "netns", "exec", name]

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    if shutil.which("ip") is None:
        pytest.skip("no ip command here")
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as fault:
        pytest.skip(f"networks cannot be made here: {fault.stderr.decode()[:100]}")
    with ExitStack() as open_:
        open_.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", name)
        run("ip", "addr", "add", f"{here}/24", "dev", ends[0])
        run("ip", "link", "set", ends[0], "up")
        run(*inside, "ip", "addr", "add", f"{there}/24", "dev", ends[1])
        for device in ("lo", ends[1]):
            run(*inside, "ip", "link", "set", device, "up")
        yield name, there, [*inside, "ip", "link", "set", ends[1]]


def test_a_cut_network_is_found_again(cuts: Cuts, tmp_path: Path) -> None:
    """All shards are behind a wire that is pulled: nothing comes, and nothing says so."""
    words = ("batch=1", "shards_ms=300", "shards_lost=default_row")
    with network(77) as (name, address, wire):
        more = {"hosts": dict.fromkeys(range(SHARDS), address), "scripts": (INSIDE % name, None)}
        with fleet(cuts.places[OLD], tmp_path, SHARDS, *words, **more) as own, cuts.load(own) as load:
            for seconds in (1, 8):
                subprocess.run([*wire, "down"], check=True)
                load.more("partial", 200)
                time.sleep(seconds)
                subprocess.run([*wire, "up"], check=True)
                back = time.monotonic()
                load.more("right", 50)
                print(f"away for {seconds} s and more: right answers {time.monotonic() - back:.1f} s later")
            late = own.figure("shards_late")
    assert set(load.found) == {"partial"}
    assert late <= 20


def test_all_take_another_version_over_at_a_signal(cuts: Cuts, tmp_path: Path) -> None:
    """The directories are replaced; shards first, then the main server with two workers."""
    live = tmp_path / "live"
    shutil.copytree(cuts.places[OLD], live)

    def replaced(name: str, version: int) -> None:
        shutil.copytree(cuts.places[version] / name, live / f"{name}.new")
        (live / name).rename(live / f"{name}.old")
        (live / f"{name}.new").rename(live / name)
        shutil.rmtree(live / f"{name}.old")

    with fleet(live, tmp_path / "fleet", SHARDS, "batch=1", "workers=2") as own, cuts.load(own) as load:
        for version in (NEW, OLD, NEW):
            for number in range(SHARDS):
                replaced(shard_folder(number), version)
                said = own.shards[number].out.read_text().count("now serving")
                own.shards[number].send(signal.SIGHUP)
                while own.shards[number].out.read_text().count("now serving") == said:
                    load.more("right", 5)
            replaced(MAIN, version)
            before = load.right[version]
            own.main.send(signal.SIGHUP)
            while load.right[version] < before + 200:
                load.more("right", 5)
    assert not load.found
    assert min(load.right) >= 200


def rolled(cuts: Cuts, own: Fleet, load: Load, old: int, new: int) -> None:
    """What Kubernetes does once both manifests name another cut: a new main server is started, and waits for
    its shards; these are replaced one after the other; the old main server goes once the new one answers."""
    port = free_port()
    main = own.begin_main(port, cuts.places[new], "shards_wait=240")
    for number in range(len(own.shards)):
        own.shards[number].send(signal.SIGTERM)
        own.shards[number].ended()
        also = cuts.places[old] / shard_folder(number // own.replicas)
        own.shards[number] = own.shard(number, f"also={also}", directory=cuts.places[new])
        own.shards[number].until("serving shard")
        time.sleep(CONNECTED)
        load.more("right", 50)
    main.until("serving '")
    load.hosts.append(f"127.0.0.1:{port}")
    load.hosts.pop(0)
    own.main.send(signal.SIGTERM)
    own.main.ended()
    own.main, own.host = main, load.hosts[0]
    before = load.right[new]
    while load.right[new] < before + 100:
        load.more("right", 10)


def test_a_rolling_update_of_all_processes_mixes_nothing(cuts: Cuts, tmp_path: Path) -> None:
    with fleet(cuts.places[OLD], tmp_path, SHARDS, "batch=1", replicas=2) as own, cuts.load(own) as load:
        rolled(cuts, own, load, OLD, NEW)
        rolled(cuts, own, load, NEW, OLD)
    # A client's connection may end as its next request is on the way, which a proxy would send again.
    assert set(load.found) <= {"lost"}
    assert load.found["lost"] <= 2 * load.count
    assert min(load.right) >= 100


@pytest.mark.parametrize(
    ("scripts", "what"),
    [
        ((None, None), "refused"),
        ((ANY_VERSION, None), "refused"),
        ((None, TAKES_ALL), "refused"),
        ((ANY_VERSION, TAKES_ALL), "wrong"),
    ],
)
def test_without_the_checks_of_versions_answers_would_be_wrong(
    cuts: Cuts, tmp_path: Path, scripts: tuple[str | None, str | None], what: str
) -> None:
    """The negative control: shards that have another version alone, and one or both sides not looking."""
    with (
        fleet(cuts.places[OLD], tmp_path, SHARDS, "batch=1", scripts=scripts) as own,
        cuts.load(own) as load,
    ):
        for number in range(SHARDS):
            own.shards[number].kill()
            own.shards[number] = own.shard(number, directory=cuts.places[NEW])
            own.shards[number].until("serving shard")
        load.more(what, 50)
    assert ("wrong" in load.found) == (what == "wrong")
