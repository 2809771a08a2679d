"""Load for an HTTP server from a native client, which takes a tenth of a Python client's processor time.

On a machine of few cores the client's time is taken from the server, and Python's timers are of a
millisecond: requests that were to come one after the other then come together, and wait for each other.
``open_loop`` counts a request's time from when it was to be sent, not from when a connection was free, so
that a server that stalls is charged for all who waited.
"""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from serving_load import Figures, Load

SOURCE = Path(__file__).with_name("serving_client.c")


def closed_loop(port: int, requests: Sequence[bytes], connections: int, seconds: float) -> Load:
    """Each connection sends the next request when it has its answer."""
    return _asked(port, requests, connections, seconds, None)


def open_loop(port: int, requests: Sequence[bytes], arrivals: Figures, connections: int = 64) -> Load:
    """Sends a request at each of ``arrivals``, seconds from the start, over whichever connection is free."""
    return _asked(port, requests, connections, 0.0, arrivals)


def _asked(
    port: int, requests: Sequence[bytes], connections: int, seconds: float, arrivals: Figures | None
) -> Load:
    with tempfile.TemporaryDirectory() as folder:
        asked, when = Path(folder, "requests"), Path(folder, "arrivals")
        asked.write_bytes(b"".join(struct.pack("<Q", len(one)) + one for one in requests))
        words = [client(), str(port), str(asked), str(connections), str(seconds)]
        if arrivals is not None:
            when.write_bytes(arrivals.astype(np.float64).tobytes())
            words.append(str(when))
        done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.decode())
    found: NDArray[np.float64] = np.frombuffer(done.stdout).reshape(-1, 3)
    begins, times, status = found[:-1].T
    return Load(begins, times, int((status != 200).sum()), float(found[-1, 0]))


@cache
def client() -> str:
    """The compiled client."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit("the client needs a C compiler: install gcc, or name one with CC=")
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([compiler, "-O2", "-o", f"{folder}/client", str(SOURCE)], check=True)
    return f"{folder}/client"


def batch_server(alone: float, fastest: float, connections: int, arrivals: Figures) -> Figures:
    """Seconds that each request takes at an ideal server with nothing beside it: it takes all that wait at
    once, and is busy for c0 + c1 n seconds with n of them.

    c0 and c1 are those of the measured server: a request alone takes ``alone`` seconds, and ``connections``
    at a time, in one batch, come to ``fastest`` requests a second.
    """
    each = max(0.0, (connections / fastest - alone) / (connections - 1))
    first = max(0.0, alone - each)
    times, at, taken = np.empty(len(arrivals)), 0.0, 0
    while taken < len(arrivals):
        at = max(at, arrivals[taken])
        waiting = int(np.searchsorted(arrivals, at, "right"))
        at += first + each * (waiting - taken)
        times[taken:waiting] = at - arrivals[taken:waiting]
        taken = waiting
    return times
