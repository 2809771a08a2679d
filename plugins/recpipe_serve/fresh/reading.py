"""Deltas are read beside the server: by a process that gives way to all others, so that neither Python's lock
nor a core is taken from requests while digests are computed and rows are checked.

The process gets the names of directories on a socket. What it has read comes back as a file in memory, which
the server maps: there it only copies rows.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import save

from recpipe.answers import score
from recpipe.answers.delta import Delta
from recpipe.common.process import LOW_PRIORITY
from recpipe.errors import UserError

log = logging.getLogger("recpipe")
LARGEST = 65536
"""Bytes of a message."""
CONTENT = "content"
"""What a delta's manifest says, among the tensors that come back, as JSON in uint8 [n]."""
Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Coefficients(NamedTuple):
    """Rows of an effect."""

    rows: torch.Tensor
    """int64 [n]."""
    keys: torch.Tensor
    """Their entities, int64 [n]."""
    means: torch.Tensor
    """float64 [n, D]."""
    used: int
    """How many rows the effect has."""


@dataclass(frozen=True)
class ReadDelta:
    """A delta in memory, which has been checked: its files may go. ``rows``: by table ids int64 [n],
    ascending, and rows uint8 [n, bytes]; ``ids``: by map keys int64 [n], ascending, and rows int32 [n], -1
    for none; ``dense``: parameters by name; ``effects``: by entity."""

    of: Delta
    rows: Pairs
    ids: Pairs
    dense: Mapping[str, torch.Tensor]
    effects: Mapping[str, Coefficients]

    def packed(self) -> bytes:
        """All of it as safetensors."""
        about = {"directory": str(self.of.directory), "content": self.of.content, "digest": self.of.digest}
        found = {CONTENT: torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)}
        for kind, pairs in (("rows", self.rows), ("ids", self.ids)):
            for number, (one, other) in enumerate(pairs.values()):
                found |= {f"{kind} {number} 0": one, f"{kind} {number} 1": other}
        for number, own in enumerate(self.effects.values()):
            found |= {f"effects {number} {part}": value for part, value in enumerate(own[:3])}
        return save(found | {f"dense {name}": value for name, value in self.dense.items()})

    @classmethod
    def unpacked(cls, file: Path) -> ReadDelta:
        """What was ``packed`` into ``file``, which is mapped."""
        held = score.tensors(file)
        about = json.loads(held.pop(CONTENT).numpy().tobytes())
        content = about["content"]

        def pairs(kind: str, names: Mapping[str, Any]) -> Pairs:
            return {
                name: (held[f"{kind} {number} 0"], held[f"{kind} {number} 1"])
                for number, name in enumerate(names)
            }

        # Programs read parameters where they lie, and MKL rounds by that: torch's own memory is aligned.
        dense = {n.removeprefix("dense "): v.clone() for n, v in held.items() if n.startswith("dense ")}
        delta = Delta(Path(about["directory"]), content, about["digest"])
        effects = {
            name: Coefficients(
                held[f"effects {n} 0"], held[f"effects {n} 1"], held[f"effects {n} 2"], own["used"]
            )
            for n, (name, own) in enumerate(content.get("effects", {}).items())
        }
        return cls(delta, pairs("rows", content["tables"]), pairs("ids", content["maps"]), dense, effects)


class Reads(Protocol):
    """What reads deltas of a package with this ``manifest``, whose parameters are ``like`` these, and refuses
    those that the owner of the public key ``trust`` has not signed."""

    def __init__(
        self, manifest: Mapping[str, Any], like: Mapping[str, torch.Tensor], trust: Path | None
    ) -> None: ...

    def begin(self) -> None:
        """Be ready to read soon."""

    def read(self, directory: Path) -> ReadDelta:
        """The delta in ``directory``; ``UserError`` for one that is damaged, or has other tables, ids or
        parameters than the package."""

    def close(self) -> None:
        """Nothing is read any more; what is being read is given up."""


class DeltaReader:
    """Reads in the thread that asks; see ``Reads``."""

    def __init__(
        self, manifest: Mapping[str, Any], like: Mapping[str, torch.Tensor], trust: Path | None
    ) -> None:
        self.manifest, self.like, self.trust = manifest, like, trust

    def begin(self) -> None:
        """It is."""

    def read(self, directory: Path) -> ReadDelta:
        """See ``Reads``."""
        delta = Delta.read(directory, self.trust)
        delta.require_one_kind(self.manifest)
        rows = {name: (ids.clone(), own.clone()) for name, ids, own in delta.rows(self.manifest)}
        ids = {name: (keys.clone(), own.clone()) for name, keys, own in delta.ids(self.manifest)}
        dense = {name: value.clone() for name, value in delta.dense(self.like).items()}
        effects = {}
        for entity, learnt in delta.coefficients(self.manifest):
            given = learnt.rows, learnt.records[:, 0], learnt.parts["means"]
            numbers, keys, means = (torch.from_numpy(each.copy()) for each in given)
            effects[entity] = Coefficients(numbers, keys, means, learnt.used)
        return ReadDelta(delta, rows, ids, dense, effects)

    def close(self) -> None:
        """Nothing is held."""


class ReaderProcess:
    """Has a process read, which is started again if it has died; see ``Reads``. One thread begins and reads;
    any may close."""

    def __init__(
        self, manifest: Mapping[str, Any], like: Mapping[str, torch.Tensor], trust: Path | None
    ) -> None:
        shapes = {name: [str(v.dtype).partition(".")[2], list(v.shape)] for name, v in like.items()}
        told = {"manifest": manifest, "like": shapes, "trust": None if trust is None else str(trust)}
        self._told = json.dumps(told).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    def begin(self) -> None:
        """Start the process, whose imports take seconds."""
        if self._channel is None and not self._closed:
            self._channel = self._start()

    def read(self, directory: Path) -> ReadDelta:
        """See ``Reads``."""
        for _ in range(2):
            if self._closed:
                raise UserError(f"{directory}: it is read no longer, since another package is served now")
            found = self._asked(directory)
            if found is not None:
                return found
            if self._process is None:
                continue
            status = self._ended()
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            if not self._closed:
                log.warning("the process that reads deltas %s; it is started again", how)
        raise UserError(
            f"{directory}: the process that reads deltas ended twice, and {how} at last; see what it printed"
        )

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return None if self._process is None else self._process.pid

    def _asked(self, directory: Path) -> ReadDelta | None:
        """The delta; None if the process has died."""
        self.begin()
        if self._channel is None:
            return None
        try:
            self._channel.send(os.fsencode(directory))
            message, files, *_ = socket.recv_fds(self._channel, LARGEST, 1)
        except OSError:
            return None
        if not message:
            return None
        if not files:
            raise UserError(message.decode())
        (file,) = files
        try:
            return ReadDelta.unpacked(Path(f"/proc/self/fd/{file}"))
        finally:
            os.close(file)

    def _start(self) -> socket.socket:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told = _in_memory(self._told)
        try:
            files = [its.fileno(), told]
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, files)],
                pass_fds=files,
                process_group=0,  # Ctrl-C is for the server, with which it ends
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            with suppress(OSError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, self._process.pid, LOW_PRIORITY)
        finally:
            its.close()
            os.close(told)
        return mine

    def _ended(self) -> int:
        """The status of the process, which has closed its end of the channel."""
        assert self._process is not None
        assert self._channel is not None
        self._channel.close()
        self._process.kill()
        status = self._process.wait()
        self._process = self._channel = None
        return status

    def close(self) -> None:
        """See ``Reads``."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()


def _in_memory(content: bytes) -> int:
    """A file in memory with this ``content``, open at its beginning."""
    file = os.memfd_create("delta")
    with os.fdopen(file, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def serve(channel: socket.socket, told: bytes) -> None:
    """Read what is asked for on ``channel`` until its other end is closed, as ``told``."""
    about = json.loads(told)
    like = {
        name: torch.empty(shape, dtype=getattr(torch, kind), device="meta")
        for name, (kind, shape) in about["like"].items()
    }
    reader = DeltaReader(about["manifest"], like, None if about["trust"] is None else Path(about["trust"]))
    with suppress(ConnectionError):  # the server has gone
        while message := channel.recv(LARGEST):
            try:
                found = reader.read(Path(os.fsdecode(message))).packed()
            except UserError as fault:
                channel.send(str(fault).encode()[:LARGEST])
                continue
            file = _in_memory(found)
            socket.send_fds(channel, [b"read"], [file])
            os.close(file)


def main() -> int:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with os.fdopen(int(sys.argv[2]), "rb") as stream:
        told = stream.read()
    serve(socket.socket(fileno=int(sys.argv[1])), told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
