"""State of the whole process: settings to make before torch is imported, Python's garbage collector, and what
several runs in one process need at the same time. Nothing here imports torch."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from threading import Lock, get_native_id
from time import perf_counter
from typing import Any

SPREAD = "recpipe-spread"
"""What the names of the threads begin with that compiled loops are spread over (``common/loops.py``)."""


class Shared:
    """State that ``make`` sets up. The first user, in any thread, sets it up; the last one undoes it."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = Lock()
        self._inside = 0
        self._made: AbstractContextManager[None] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In the block, the state is set up."""
        with self._lock:
            if not self._inside:
                self._made = self._make()
                self._made.__enter__()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._made is not None:
                    self._made.__exit__(None, None, None)


_kept = False
"""Whether ``keep_all`` has been called, after which nothing may be given back to the collector."""


@contextmanager
def importing() -> Iterator[None]:
    """In the block nothing is collected, and after imports what there is at its end stays as long as the
    process.

    torch and what belongs to it are 440,000 objects. To look through them each time that their number had
    grown by a quarter, and again at the process's end, took longer than to import torch.
    """
    collects, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:  # a sweep's second job would otherwise keep what the first has left
            keep_all()
        if collects:
            gc.enable()


def keep_all() -> None:
    """Let the collector leave alone all that there is now, as long as the process lasts."""
    global _kept
    gc.freeze()
    _kept = True


@contextmanager
def old_objects_kept() -> Iterator[None]:
    """In the block the collector leaves alone what there was before it, most of it modules' objects."""
    if _kept:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_imported: float | None = perf_counter()


def run_start() -> float:
    """``perf_counter()`` at recpipe's first line in this process. For later runs of the process (a sweep's),
    the time of this call."""
    global _imported
    start, _imported = _imported, None
    return perf_counter() if start is None else start


NOISE = (
    r".*does not have many workers.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*Using ModelCheckpoint with manual optimization.*",
    r".*Experiment logs directory .* exists and is not empty.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*smaller than the logging interval.*",
    r".*`weights_only`.*",
    r".*resuming from a checkpoint that ended before the epoch ended.*",
    r".*HeuristicalStorageReservation is known to cause issues.*",
    r".*`broadcast_buffers` is deprecated.*",
    r".*torch.distributed.*_tensor` is deprecated.*",
    r".*dense_embedding_codegen_lookup_function: an autograd kernel was not registered.*",
    r".*Please use DTensor instead and we are deprecating ShardedTensor.*",
    r".*You are using `torch.load` with `weights_only=False`.*",
    r".*TypedStorage is deprecated.*",
    r".*_get_pg_default_device` will be deprecated.*",
    r".*Multiple backends are registered with this ProcessGroup.*",
    r".*barrier\(\): using the device under current context.*",
    # FBGEMM on a GPU: an internal choice that it reports, and its own hook on lookups behind a cache.
    r".*TBE B200 optimization.*",
    r".*Full backward hook is firing when gradients are computed with respect to module outputs.*",
    # Hydra 1.4, about what 1.5 will refuse: an argument that 1.3 needs, and objects that a recipe names
    # without a list of those it may name. A recipe is its user's own; Hydra still refuses dangerous names.
    r".*The version_base parameter is deprecated.*",
    r".*hydra.utils.instantiate\(\) resolved _target_=.*",
    r".*Hydra configured Python logging without an execution whitelist.*",
)
"""Warnings to hide: they are about things that recpipe does on purpose."""


_LEVELS = {
    "lightning.pytorch": logging.WARNING,
    "lightning.pytorch.callbacks.model_summary": logging.INFO,  # said where a recipe asks for it
    "lightning.fabric": logging.WARNING,
    # MLflow's first run makes its database and an experiment.
    "lightning.pytorch.loggers.mlflow": logging.ERROR,
    "mlflow.store": logging.WARNING,
    "mlflow.tracking": logging.WARNING,
    "torchrec": logging.WARNING,
    "fbgemm_gpu": logging.WARNING,
    # TorchRec's planner warns about every replicated table, and about a way to make topologies new in 1.8.
    "torchrec.distributed": logging.ERROR,
    "torch.fx._symbolic_trace": logging.ERROR,
}


def quiet_libraries() -> None:
    """Hide banners, deprecations inside libraries and known noise; warnings about user mistakes stay."""
    # Torch's profiler prints on stderr that it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Of several processes (torchrun) only the first one prints info; all of them print warnings.
    leads = os.environ.get("RANK", "0") == "0"
    # FBGEMM reports every library that it loads through the root logger.
    _set_levels({"": logging.WARNING, "recpipe": logging.INFO if leads else logging.WARNING, **_LEVELS})
    logging.getLogger().addFilter(_worth_saying)
    hide_known_warnings()


def _set_levels(levels: Mapping[str, int]) -> None:
    for name, level in levels.items():
        if logging.getLogger(name).level != level:  # to set it empties the caches of all loggers
            logging.getLogger(name).setLevel(level)


def hide_known_warnings() -> None:
    """Hide the warnings in ``NOISE``."""
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def _quieted() -> Iterator[None]:
    names = ("", "recpipe", *_LEVELS)
    before = {name: logging.getLogger(name).level for name in names}
    filters = list(logging.getLogger().filters)
    with warnings.catch_warnings():
        quiet_libraries()
        try:
            yield
        finally:
            _set_levels(before)
            logging.getLogger().filters[:] = filters


quieted = Shared(_quieted)
"""``quiet_libraries`` for a block; afterwards the program has its own logging and warnings again."""


_SAID = (
    "Sharding spec not found",  # TorchRec, for each data-parallel table of a plan
    "Could not determine LOCAL_WORLD_SIZE",  # TorchRec, without torchrun; it takes all ranks, as recpipe does
    "_fbgemm_torch_compat_table has no entry",  # FBGEMM, which knows fewer releases than ``recpipe doctor``
)


def _worth_saying(record: logging.LogRecord) -> bool:
    """Whether to print a record of the root logger."""
    message = record.getMessage().strip()
    return not any(said in message for said in _SAID)


def calm_threads() -> None:
    """Let OpenMP threads spin for microseconds, not milliseconds, before they sleep at a barrier.

    The loader and the I/O thread share the cores with torch's threads. A thread that spins keeps its core
    from the thread that it waits for: a backward pass of 2 ms took 1,200 ms on 2 busy cores. libgomp reads
    the setting when torch loads it; a user's own setting is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


LOW_PRIORITY = 10
"""The nice value of what lets others go first: beside one that wants all of a core it has a tenth of it."""


def give_way() -> None:
    """Let others have the cores before the calling thread, for good.

    It should hold Python's lock for moments alone: whoever waits for the lock waits for a thread that waits
    for a core.
    """
    os.setpriority(os.PRIO_PROCESS, get_native_id(), LOW_PRIORITY)


def imported_from(where: str) -> Any:
    """The object that ``where``, a ``module:name``, names; its module is imported now."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def lazily(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``, whose public names are objects at ``places``."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return imported_from(places[name])

    return get
