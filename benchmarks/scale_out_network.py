"""Network namespaces of this machine, one a server, joined by a bridge, whose links ``tbf`` gives a rate."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NET, HUB, MAIN = "10.231.77", "rso-hub", "rso-main"
BURST = 15_140
"""Bytes of a bucket, which pass at once: ten packets, so that a timer that is late loses nothing."""
CLONE_NEWNET = 0x40000000


def can_make_namespaces() -> str:
    """Why network namespaces with tbf cannot be made here; empty: they can."""
    if os.geteuid():
        return "only root makes network namespaces"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip and tc (iproute2) are not installed"
    name = "rso-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "a0", "type", "veth", "peer", "name", "b0")
        _run("tc", "-n", name, "qdisc", "add", "dev", "a0", "root", *_tbf(1.0))
    except (OSError, subprocess.CalledProcessError) as fault:
        return f"this kernel does not make them: {fault}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _tbf(gbit: float) -> list[str]:
    return ["tbf", "rate", f"{round(gbit * 1000)}mbit", "burst", str(BURST), "latency", "200ms"]


@contextmanager
def inside(namespace: str | None) -> Iterator[None]:
    """Sockets that are made in the block, and processes that are started there, are in this network namespace
    (None: where one is)."""
    if namespace is None:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as before, Path(f"/run/netns/{namespace}").open() as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        try:
            yield
        finally:
            libc.setns(before.fileno(), CLONE_NEWNET)


@dataclass
class Network:
    """Where the servers of one run are."""

    shards: int
    apart: bool
    """Whether each has a network namespace."""

    @property
    def main(self) -> str | None:
        """The main server's namespace, and the client's."""
        return MAIN if self.apart else None

    @property
    def hub(self) -> str | None:
        """The relay's."""
        return HUB if self.apart else None

    def of_shard(self, number: int) -> str | None:
        """A shard's."""
        return f"rso-s{number}" if self.apart else None

    def host(self, number: int) -> str:
        """A shard's address."""
        return f"{NET}.{10 + number}" if self.apart else "127.0.0.1"

    @contextmanager
    def up(self) -> Iterator[None]:
        """The namespaces are there in the block."""
        if not self.apart:
            yield
            return
        names = {HUB: "", MAIN: f"{NET}.2", **{f"rso-s{k}": self.host(k) for k in range(self.shards)}}
        self.down()
        try:
            for name in names:
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", HUB, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", HUB, "addr", "add", f"{NET}.1/24", "dev", "br0")
            _run("ip", "-n", HUB, "link", "set", "br0", "up")
            for name, address in names.items():
                if name == HUB:
                    continue
                _run(
                    "ip",
                    "-n",
                    HUB,
                    "link",
                    "add",
                    name,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    name,
                )
                _run("ip", "-n", HUB, "link", "set", name, "master", "br0", "up")
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
            yield
        finally:
            self.down()

    def down(self) -> None:
        """Take away what a run has left."""
        found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        for line in found.splitlines():
            name = line.split()[0]
            if name.startswith("rso-"):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def limit(self, gbit: float) -> None:
        """Give each server's link a rate in both directions; 0: none."""
        for name in (MAIN, *(f"rso-s{k}" for k in range(self.shards))):
            for where, device in ((name, "eth0"), (HUB, name)):
                if gbit:
                    _run("tc", "-n", where, "qdisc", "replace", "dev", device, "root", *_tbf(gbit))
                else:
                    subprocess.run(
                        ["tc", "-n", where, "qdisc", "del", "dev", device, "root"],
                        capture_output=True,
                        check=False,
                    )
