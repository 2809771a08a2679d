"""The servers of benchmarks/scale_out.py: processes, and the links between them.

Links are network namespaces of this machine with ``tbf`` queues, where these can be made, or the relay's own
limits. The delay is the relay's in both: kernels without netem have none. A byte goes from the main server
through its own uplink, the relay, and the shard's downlink; answers the other way round.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scale_out_network import NET, Network, inside
from serving_load import Load, arrivals
from serving_native import open_loop

RELAY = Path(__file__).with_name("relay.c")
ROLE = Path(__file__).with_name("scale_out_traces.py")


class Process:
    """A process of its own session, which has said that it is ready."""

    def __init__(self, command: Sequence[str], log: Path, says: str) -> None:
        with log.open("wb") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
        self.log, until = log, time.monotonic() + 180
        self.command = " ".join(command)
        self.says, self.until = says, until

    def ready(self) -> None:
        """Return once it is."""
        while self.says not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > self.until:
                sys.exit(f"{self.command} does not answer: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    @property
    def cpu(self) -> float:
        """Seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def send(self, number: int) -> None:
        """A signal."""
        self.process.send_signal(number)

    def say(self, line: str) -> None:
        """Write a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Tell it to stop."""
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.process.terminate()

    def end(self) -> None:
        """Stop it, and wait for its end."""
        self.stop()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def free_ports(count: int) -> list[int]:
    """That nobody listens on now."""
    with ExitStack() as open_:
        own = [open_.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in own]


def compiled(folder: Path) -> Path:
    """The relay."""
    target = folder / "relay"
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    subprocess.run([compiler, "-O2", "-o", str(target), str(RELAY)], check=True)
    return target


class Links:
    """The relay between a main server and its shards, and the rate and delay of their links."""

    def __init__(self, network: Network, relay: Process) -> None:
        self.network, self.relay = network, relay

    def set(self, gbit: float, delay_us: float) -> None:
        """From now on; 0 Gbit/s: no limit."""
        if self.network.apart:
            self.network.limit(gbit)
        own = 0.0 if self.network.apart else 1e3 * gbit
        self.relay.say(f"{own} {delay_us}")
        time.sleep(0.1)


@dataclass
class Loaded:
    """What came of a load."""

    load: Load
    cpu: float
    """Seconds of a request, of all servers."""
    relayed: float
    """The relay's."""
    began: float
    ended: float
    """As perf_counter counts, which all processes of this machine have alike."""


class Side:
    """Servers that answer together, stopped until they are asked."""

    def __init__(
        self, port: int, asked: list[bytes], servers: list[Process], network: Network, links: Links | None
    ) -> None:
        self.port, self.asked, self.servers, self.network, self.links = port, asked, servers, network, links

    def open(self, rate: float, seconds: float, seed: int) -> Loaded:
        """Requests at random times."""
        with self._awake():
            open_loop(self.port, self.asked, arrivals(rate, 0.5, seed + 1000))
            return self._loaded(lambda: open_loop(self.port, self.asked, arrivals(rate, seconds, seed)))

    def regular(self, rate: float, seconds: float, groups: Sequence[int]) -> Loaded:
        """As many requests a second at regular times, in ``groups`` of so many at once, again and again."""
        gap = sum(groups) / len(groups) / rate
        sizes = np.resize(groups, max(len(groups), int(seconds / gap)))
        when = np.repeat(gap * np.arange(len(sizes)), sizes)
        with self._awake():
            open_loop(self.port, self.asked, arrivals(rate, 0.5, 1000))
            return self._loaded(lambda: open_loop(self.port, self.asked, when))

    def _loaded(self, load: Callable[[], Load]) -> Loaded:
        before, relayed = self._cpu()
        began = time.perf_counter()
        done = load()
        ended = time.perf_counter()
        if done.failed:
            sys.exit(f"{done.failed} requests failed; see {self.servers[-1].log.read_text()[-2000:]}")
        now, relayed_now = self._cpu()
        count = len(done.times)
        return Loaded(done, (now - before) / count, (relayed_now - relayed) / count, began, ended)

    def _cpu(self) -> tuple[float, float]:
        return sum(one.cpu for one in self.servers), self.links.relay.cpu if self.links else 0.0

    @contextmanager
    def _awake(self) -> Iterator[None]:
        every = [*self.servers, *([self.links.relay] if self.links else [])]
        for one in every:
            one.send(signal.SIGCONT)
        try:
            with inside(self.network.main):
                yield
        finally:
            for one in every:
                one.send(signal.SIGSTOP)


def served(words: Sequence[str], trace: Path, log: Path, says: str) -> Process:
    """``recpipe serve``, whose batches are written into ``trace`` when it ends."""
    return Process([sys.executable, str(ROLE), str(trace), "serve", *words], log, says)


@contextmanager
def single(package: Path, asked: list[bytes], folder: Path, network: Network) -> Iterator[Side]:
    """The whole package on one server, where the main server would be."""
    (port,) = free_ports(1)
    words = [str(package), f"port={port}"]
    with inside(network.main):
        server = served(words, folder / "single.jsonl", folder / "single.log", "serving '")
    try:
        server.ready()
        yield Side(port, asked, [server], network, None)
    finally:
        server.end()


@contextmanager
def sharded(
    cut: Path, name: str, asked: list[bytes], folder: Path, network: Network, relay: Path
) -> Iterator[Side]:
    """The shards of a cut behind links, and the main server that asks them."""
    count = network.shards
    main, *others = free_ports(1 + 2 * count)
    own, seen = others[:count], others[count:]
    with ExitStack() as open_:
        servers = []
        for at, port in enumerate(own):
            words = [str(cut / f"shard{at}"), f"host={network.host(at)}", f"port={port}"]
            with inside(network.of_shard(at)):
                one = served(words, folder / f"shard{at}.jsonl", folder / f"shard{at}.log", "serving shard")
            open_.callback(one.end)
            servers.append(one)
        pairs = [f"{a}:{network.host(at)}:{b}" for at, (a, b) in enumerate(zip(seen, own, strict=True))]
        with inside(network.hub):
            links = Process([str(relay), "0", "0", *pairs], folder / "relay.log", "relaying")
        open_.callback(links.end)
        for one in (*servers, links):
            one.ready()
        hub = f"{NET}.1" if network.apart else "127.0.0.1"
        given = ",".join(f"{hub}:{port}" for port in seen)
        words = [
            str(cut / "main.recpipe"),
            f"port={main}",
            f"name={name}",
            f"shards={given}",
            "shards_ms=5000",
        ]
        with inside(network.main):
            one = served(words, folder / "main.jsonl", folder / "main.log", "serving '")
        open_.callback(one.end)
        one.ready()
        every = [*servers, one]
        open_.callback(lambda: [each.stop() for each in (*every, links)])
        yield Side(main, asked, every, network, Links(network, links))
