"""What a call takes and leaves behind: memory, threads, files, the environment, random numbers."""

from __future__ import annotations

import os
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from recpipe.plugin.api import Contribution, Link
from recpipe.tasks.plugins import points
from recpipe.testing.process import random_state, settings
from recpipe.testing.replaced import Replaced

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {
    "os.mkdir": "made the folder",
    "os.rename": "renamed",
    "os.remove": "removed",
    "os.rmdir": "removed the folder",
    "os.link": "linked",
    "os.symlink": "linked",
    "os.truncate": "cut",
    "os.chmod": "changed the mode of",
    "os.putenv": "set the environment variable",
    "os.unsetenv": "removed the environment variable",
    "os.chdir": "changed the folder to",
    "os.system": "ran",
    "os.posix_spawn": "ran",
    "os.fork": "forked",
    "subprocess.Popen": "ran",
    "socket.connect": "connected to",
    "socket.bind": "listened at",
}


def outline(contribution: Contribution) -> dict[str, Any]:
    """What two equal contributions have in common: points used, labels and order of links, claims, keys."""
    chains: dict[str, Sequence[Link[Any]]]
    chains = {"stream": contribution.stream, "batch": contribution.batch, "step": contribution.step}
    return {
        "points": points(contribution),
        "chains": {name: [(k.name, k.before, k.after) for k in links] for name, links in chains.items()},
        "cache": [(claim.tables, type(claim)) for claim in contribution.cache],
        "quantizer": type(contribution.quantizer),
        "callbacks": [type(callback) for callback in contribution.callbacks],
    }


@dataclass
class Cost:
    """What a piece of code took: peak bytes (Python, numpy and new tensors) and threads left running."""

    bytes: int = 0
    threads: int = 0


@contextmanager
def costs() -> Iterator[Cost]:
    """Measure the body. Torch's allocations are counted as the sizes of the tensors that operators return."""
    from recpipe.private_api import TorchDispatchMode, tree_leaves

    cost, threads = Cost(), threading.active_count()

    class Tensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            cost.bytes += sum(t.nbytes for t in tree_leaves(result) if hasattr(t, "nbytes"))
            return result

    tracemalloc.start()
    try:
        with Tensors():  # type: ignore[no-untyped-call]
            yield cost
        cost.bytes += tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    cost.threads = threading.active_count() - threads


@contextmanager
def deeds() -> Iterator[list[str]]:
    """List what the body does, in this thread, to the machine and to this process: files written, environment
    variables set, programs started, connections opened, random numbers drawn, functions replaced."""
    if not _Hook.installed:
        sys.addaudithook(_Hook.heard)
        _Hook.installed = True
    found: list[str] = []
    before, code = _state(), Replaced()
    _Hook.active = (threading.get_ident(), found)
    try:
        yield found
    finally:
        _Hook.active = None
    found += [f"changed {name}" for name, value in _state().items() if before.get(name) != value]
    found += [f"replaced {name}" for name in code.all()]


class _Hook:
    """Python's audit hook, which cannot be removed; it does nothing while no ``deeds`` block is open."""

    installed = False
    active: tuple[int, list[str]] | None = None

    @classmethod
    def heard(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls.active is None or cls.active[0] != threading.get_ident():
            return
        if event == "open":
            path, _, flags = arguments
            if flags & _WRITES and _is_a_place(path):
                cls.active[1].append(f"wrote {_text(path)}")
        elif event in _EVENTS and (not event.startswith("os.") or not arguments or _is_a_place(arguments[0])):
            cls.active[1].append(f"{_EVENTS[event]} {_text(arguments[0] if arguments else '')}".strip())


def _is_a_place(path: object) -> bool:
    """Whether an opened path counts; what Python itself writes when it imports does not."""
    return isinstance(path, str | bytes | os.PathLike) and not (
        "__pycache__" in _text(path) or _text(path) == os.devnull
    )


def _text(value: object) -> str:
    if isinstance(value, str | bytes | os.PathLike):
        return os.fsdecode(value)
    return str(value)


def _state() -> dict[str, object]:
    """The state of the process that a plugin must leave alone."""
    whose = ("Python's", "numpy's", "torch's")
    numbers = {f"{name} random numbers": state for name, state in zip(whose, random_state(), strict=True)}
    return {**settings(), **numbers}
