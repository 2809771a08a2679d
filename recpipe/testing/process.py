"""What a run must leave in its process as it found it: libraries, settings, threads, files."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch.multiprocessing import get_sharing_strategy

from recpipe.config.compose import active_plugins
from recpipe.plugin.api import Plugin
from recpipe.plugin.load import instantiate
from recpipe.private_api import global_hooks
from recpipe.tasks.plugins import SAMPLE
from recpipe.testing.replaced import Replaced

PATIENCE = 2.0
"""Seconds that threads and processes are given to end after a run."""
NAMELESS = "file descriptor"
_BECOMES_PARENT = 36  # PR_SET_CHILD_SUBREAPER of Linux


@cache
def libraries() -> Replaced:
    """The libraries as they are at the first call, which is before a plugin is imported."""
    return Replaced()


class Process:
    """This process as it is before a run; says what has changed since."""

    def __init__(self) -> None:
        self.libraries = libraries()
        self.settings = settings()
        self.threads = set(sys._current_frames())
        self.children = set(_children())
        self.files = _open_files()

    def changed(self) -> Iterator[str]:
        """Settings that are others at this moment, and replaced functions among those that are used most."""
        for name in self.libraries.glance():
            yield f"replaces {name}"
        yield from self._changed_settings()

    def left(self) -> Iterator[str]:
        """What a run that has ended has left changed, running or open. Processes that it left are ended."""
        yield from (f"replaces {name}" for name in self.libraries.all())
        yield from self._changed_settings()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and (self._threads() or self._processes()):
            time.sleep(0.01)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        yield from sorted(
            f"leaves the thread '{names.get(i, 'without a name')}' running" for i in self._threads()
        )
        for process in self._processes():
            yield f"leaves a process running ({_command(process)})"
            os.kill(process, signal.SIGKILL)
        if _open_files() - self.files:
            gc.collect()  # files of objects that refer to each other are closed
        yield from sorted(f"leaves {file} open" for file in _open_files() - self.files)

    def _changed_settings(self) -> Iterator[str]:
        now = settings()
        for name, value in self.settings.items():
            if name not in now:
                yield f"removes {name}"
            elif now[name] != value:
                yield f"changes {name} from {_short(value)} to {_short(now[name])}"
        yield from (f"sets {name} to {_short(now[name])}" for name in now.keys() - self.settings.keys())

    def _threads(self) -> set[int]:
        return set(sys._current_frames()) - self.threads

    def _processes(self) -> set[int]:
        return set(_children()) - self.children


def adopt_orphans() -> None:
    """From now on, processes whose parents have ended become this one's children, where that is possible."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_BECOMES_PARENT, 1, 0, 0, 0)


def random_state() -> tuple[str, str, str]:
    """Hashes of the states of Python's, numpy's and torch's global random numbers."""
    kind, keys, *rest = np.random.get_state()
    return (
        _hashed(repr(random.getstate()).encode()),
        _hashed(f"{kind} {rest}".encode() + np.asarray(keys).tobytes()),
        _hashed(torch.get_rng_state().numpy().tobytes()),
    )


def draw() -> None:
    """One of each of the global random numbers."""
    random.random()
    np.random.random()
    torch.rand(1)


SEED = "PL_GLOBAL_SEED"
"""Set by Lightning for every run's own seed."""


def settings() -> dict[str, object]:
    """All that is set for the whole process or its main thread, by name."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    set_by: dict[str, dict[str, object]] = {
        "the environment variable": {name: value for name, value in os.environ.items() if name != SEED},
        "Python's": {
            "folder": str(Path.cwd()),
            "search path": tuple(sys.path),
            "importers": (*map(_named, sys.meta_path), *map(_named, sys.path_hooks)),
            "arguments": tuple(sys.argv),
            "recursion limit": sys.getrecursionlimit(),
            "switch interval": sys.getswitchinterval(),
            "garbage collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)),
            **{f"handler of {s.name}": _named(signal.getsignal(s)) for s in signal.Signals},
            "alarm": signal.getitimer(signal.ITIMER_REAL)[1],
            "tracing": (*map(_named, (sys.gettrace(), sys.getprofile())),),
            "filters of warnings": tuple(map(str, warnings.filters)),
            "scratch folder": tempfile.tempdir,
            "socket timeout": socket.getdefaulttimeout(),
            "priority": os.nice(0),
            "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        },
        "numpy's": {
            "treatment of errors": tuple(np.geterr().items()),
            "way of printing": repr(np.get_printoptions()),
        },
        "torch's": {
            "number of threads": torch.get_num_threads(),
            "default type": torch.get_default_dtype(),
            "default device": torch.get_default_device(),
            "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "detection of anomalies": torch.is_anomaly_enabled(),
            "deterministic mode": torch.get_deterministic_debug_mode(),
            "precision of matrix products": torch.get_float32_matmul_precision(),
            "TF32 flags": (matmul.allow_tf32, cudnn.allow_tf32),
            "reduced precision": (
                matmul.allow_fp16_reduced_precision_reduction,
                matmul.allow_bf16_reduced_precision_reduction,
            ),
            "cuDNN flags": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
            "fused attention": torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
            "oneDNN flags": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
            "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            "treatment of tiny numbers": float(torch.tensor(1e-40) * 1) == 0,
            "sharing of tensors": get_sharing_strategy(),  # type: ignore[no-untyped-call]
            "warnings": torch.is_warn_always_enabled(),
            "hooks for all modules and optimizers": global_hooks(),
        },
    }
    return {f"{owner} {name}": value for owner, own in set_by.items() for name, value in own.items()}


def _children() -> Iterator[int]:
    """Processes that this one has started, and theirs whose parents have ended; nothing where there is no
    /proc."""
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            yield from map(int, file.read_text().split())
        except OSError:  # the thread has ended
            continue


def _command(process: int) -> str:
    try:
        return (
            Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
        )
    except OSError:
        return str(process)


def _open_files() -> Counter[str]:
    """What this process's file descriptors stand for; what has no name, such as a socket, by number and
    kind."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").glob("*"):
        try:
            target = str(link.readlink())
        except OSError:  # the one that lists them
            continue
        kind, _, rest = target.partition(":")
        found[target if not rest or target.startswith("/") else f"{NAMELESS} {link.name} ({kind})"] += 1
    return found


def _hashed(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _named(function: object) -> str:
    """The same in every process."""
    plain = function is None or isinstance(function, int)
    return str(function) if plain else getattr(function, "__qualname__", type(function).__qualname__)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({_hashed(text.encode())})"


_PLAIN = (bool, int, float, str, bytes, type(None))


class Others:
    """The plugin ``beside`` of a recipe, as it is alone: made before any other plugin is imported."""

    def __init__(self, composed: DictConfig, beside: str) -> None:
        self.name = beside
        if not beside:
            return
        alone = instantiate(beside, active_plugins(composed)[beside])
        self.cls = type(alone)
        self.code = Replaced({self.cls.__module__.partition(".")[0]})
        made = values(vars(alone))
        alone.contribute(SAMPLE)
        own = values(vars(alone))
        self.values = {name: value for name, value in made.items() if own.get(name) == value}

    def changed(self) -> Iterator[str]:
        """Attributes of the plugin's objects in this process that are not what its knobs say."""
        if not self.name:
            return
        for plugin in gc.get_objects():
            if isinstance(plugin, Plugin) and type(plugin) is self.cls:
                now = values(vars(plugin))
                for name, value in self.values.items():
                    if now.get(name) != value:
                        yield f"changes {name} of plugin '{self.name}' from {value} to {now.get(name)}"

    def left(self) -> Iterator[str]:
        """What is replaced of the plugin's code."""
        if self.name:
            yield from (f"replaces {name} of plugin '{self.name}'" for name in self.code.all())


def values(content: Any) -> Any:
    """``content`` without what is no plain value: numbers and texts, and mappings and sequences of these."""
    if isinstance(content, _PLAIN):
        return content
    if isinstance(content, dict):
        return {str(key): values(value) for key, value in content.items()}
    if isinstance(content, list | tuple | set | frozenset):
        found = [values(value) for value in content]
        return sorted(found, key=repr) if isinstance(content, set | frozenset) else found
    return type(content).__name__
