"""A plugin's part, and its calls: whatever leaves its code other than by returning becomes a ``PluginFault``,
which names the plugin and the part; threads that its code starts are remembered."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from inspect import isfunction
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from recpipe.errors import Interruption, UserError, shown
from recpipe.plugin.api import EpochOrder, StepWrapper, StreamWrapper
from recpipe.plugin.errors import PluginError, PluginFault

if TYPE_CHECKING:
    import lightning as L

    from recpipe.plugin.batch import Batch

P = TypeVar("P")
R = TypeVar("R")
LONGEST_FAULT = 300
"""Characters of an exception's own message that a line echoes."""
_OTHERS = {
    *sys.stdlib_module_names,
    "recpipe",
    "torch",
    "torchrec",
    "fbgemm_gpu",
    "lightning",
    "numpy",
    "numba",
}
"""Packages whose code no plugin has written."""
ABOUT_TO_END = 0.2
"""Seconds that a thread is waited for before it counts as left."""
_started: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
"""The plugin and the part that started each thread."""


@dataclass(frozen=True)
class Origin:
    """The plugin that a part came from, as shown in conflicts, listings and faults."""

    plugin: str
    distribution: str = "recpipe"
    version: str = "0"

    def __str__(self) -> str:
        return f"{self.plugin} ({self.distribution} {self.version})"


class blaming:
    """``with blaming(origin, part)``: what the body raises becomes a ``PluginFault`` that names both.

    What passes as it is: a fault in ``elsewhere``, one that was blamed before, a signal, and core's own
    exceptions, which core waits for. A ``UserError`` that the plugin itself raises is a line for the user
    already: it keeps its type, and gets the names if it does not name the plugin.
    """

    __slots__ = ("elsewhere", "origin", "part", "threads")

    def __init__(self, origin: Origin, part: str, elsewhere: Collection[BaseException] = ()) -> None:
        self.origin, self.part, self.elsewhere = origin, part, elsewhere

    def __enter__(self) -> None:
        self.threads = threading.active_count()

    def __exit__(self, kind: object, fault: BaseException | None, traceback: object) -> None:
        if threading.active_count() > self.threads:
            for thread in threading.enumerate()[self.threads :]:
                _started.setdefault(thread, f"plugin {self.origin}, part {self.part}")
        if fault is None or isinstance(fault, Interruption | PluginFault):
            return
        # Ctrl-C: in a run of one process a handler raises ``Interruption`` instead.
        if (
            isinstance(fault, KeyboardInterrupt)
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            return
        if any(fault is other for other in self.elsewhere):
            return
        where = _deepest_of_plugin(fault)
        if isinstance(fault, UserError):
            raised = [frame for frame, _ in walk_tb(fault.__traceback__)][-1]
            if where is not None and where[0] is raised and self.origin.plugin not in str(fault):
                first, *more = fault.args or (type(fault).__name__,)
                fault.args = (f"plugin {self.origin}, part {self.part}: {first}", *more)
            return
        if _package(type(fault).__module__) == "recpipe":
            return
        at = "" if where is None else f" ({where[0].f_code.co_filename}, line {where[1]})"
        try:
            said = f": {shown(str(fault), LONGEST_FAULT)}" if str(fault) else ""
        except Exception:  # of an exception class of the plugin's own
            said = ""
        raise PluginFault(
            f"plugin {self.origin}, part {self.part}, raised {type(fault).__name__}{said}{at}; "
            "HYDRA_FULL_ERROR=1 shows the traceback"
        ) from fault


@dataclass(frozen=True)
class Owned(Generic[P]):
    """A part and the plugin that brought it; core calls it by ``call``, which blames the plugin.

    ``label`` is ``plugin.part``. A link is called by its name, as in ``acme.remap``, or as its chain if it
    has none, ``acme.batch``; any other part by its class, as in ``acme.TinyLfu``.
    """

    label: str
    origin: Origin
    part: P
    made_by: str = ""
    """The method of the plugin's part that has made this one, as ``policy``; empty: the plugin brought it."""

    @classmethod
    def of(cls, origin: Origin, part: P) -> Owned[P]:
        """``part``, an object of a class of ``origin``'s."""
        return cls(f"{origin.plugin}.{type(part).__name__}", origin, part)

    def __str__(self) -> str:
        return f"plugin {self.origin}, part {self.label}"

    def call(
        self,
        method: Callable[..., R],
        *args: Any,
        wrong: Callable[[R], str | None] | None = None,
    ) -> R:
        """What the part's ``method`` returns, as in ``owned.call(Splitter.split, batch, needs_cold)``.

        Whatever the method raises names the plugin. ``wrong`` gives the rest of a ``PluginError`` that begins
        with the plugin and the part, or nothing if the result is as it must be.
        """
        name = method.__name__
        asked = f"{self.made_by}.{name}" if self.made_by else name
        with blaming(self.origin, f"{self.label}.{asked}"):
            result: R = getattr(self.part, name)(*args)
        said = None if wrong is None else wrong(result)
        if said:
            raise PluginError(f"{self}{said}")
        return result

    def make(self, method: Callable[..., R], *args: Any) -> R:
        """The object that ``method`` returns, for others to call: the faults of its own methods name the
        plugin as well. None, and what was handed in, stay as they are."""
        made = self.call(method, *args)
        if made is None or any(made is given for given in args):
            return made
        return blamed(self.origin, f"{self.label}.{method.__name__}", made)


def _deepest_of_plugin(fault: BaseException) -> tuple[Any, int] | None:
    """The deepest frame of ``fault`` that is a plugin's own code, and its line; that of its cause if it
    passed none, as a generator's own error does."""
    frames = walk_tb(fault.__traceback__)
    own = [found for found in frames if _package(found[0].f_globals.get("__name__")) not in _OTHERS]
    if own or fault.__cause__ is None:
        return own[-1] if own else None
    return _deepest_of_plugin(fault.__cause__)


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def threads_left() -> list[str]:
    """A line for each thread that a plugin has started, that still runs, and that would keep the process
    alive; those that are about to end are waited for."""
    alive = [(thread, whose) for thread, whose in list(_started.items()) if not thread.daemon]
    for thread, _ in alive:
        thread.join(ABOUT_TO_END)
    return [
        f"{whose}, has left thread {thread.name!r} running: the process ends without waiting for it"
        for thread, whose in alive
        if thread.is_alive()
    ]


def blame(origin: Origin, part: str, fn: Callable[..., R]) -> Callable[..., R]:
    """``fn`` with faults that name the plugin."""

    def call(*args: object, **named: object) -> R:
        with blaming(origin, part):
            return fn(*args, **named)

    return call


def blamed(origin: Origin, part: str, made: P, *bases: type) -> P:
    """``made``, an object of a class of the plugin's: the faults of each public method that the plugin has
    written, or that overrides one of ``bases``, name the plugin. It stays the same object, and an instance of
    its class."""
    kind = type(made)
    names = {name for base in kind.__mro__ if _package(base.__module__) not in _OTHERS for name in vars(base)}
    names |= {name for base in bases for name in vars(base) if getattr(kind, name) is not vars(base)[name]}
    methods = {name: getattr(kind, name) for name in names if not name.startswith("_")}
    wrapped = {name: blame(origin, f"{part}.{name}", fn) for name, fn in methods.items() if isfunction(fn)}
    # An object of one of Python's own classes has none, and its class cannot be exchanged.
    return with_methods(made, wrapped) if wrapped else made


def with_methods(made: P, methods: Mapping[str, Any]) -> P:
    """``made``, the same object, with these ``methods`` in front of those of its class."""
    kind = type(made)
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made.__class__ = type(kind.__name__, (kind,), {**same, "__slots__": (), **methods})
    return made


_DONE: Any = object()


def blame_callback(may_stop: bool, origin: Origin, part: str, callback: L.Callback) -> L.Callback:
    """``callback`` with hooks whose faults name the plugin. Unless it ``may_stop`` training, as one that
    declares SAMPLE_SET does, it is a fault if a hook makes Lightning stop."""
    import lightning as L  # with torch, which is imported where there are callbacks

    blamed(origin, part, callback, L.Callback)
    if may_stop:
        return callback

    def watched(hook: Callable[..., R], name: str) -> Callable[..., R]:
        def call(self: L.Callback, *args: Any, **named: Any) -> R:
            trainer = next((a for a in (*args, *named.values()) if isinstance(a, L.Trainer)), None)
            stopped = trainer is not None and trainer.should_stop
            result = hook(self, *args, **named)
            if trainer is not None and trainer.should_stop and not stopped:
                raise PluginError(
                    f"plugin {origin}, part {part}.{name}, ended training after step {trainer.global_step} "
                    "(trainer.should_stop): a plugin that does declares Invariant.SAMPLE_SET in alters"
                )
            return result

        return call

    hooks = {n: fn for n, fn in vars(type(callback)).items() if isfunction(fn) and hasattr(L.Callback, n)}
    return with_methods(callback, {name: watched(fn, name) for name, fn in hooks.items()})


def drawn(
    origin: Origin, part: str, make: Callable[[], Iterator[R]], elsewhere: Collection[BaseException] = ()
) -> Iterator[R]:
    """What the iterator that ``make`` returns yields; a generator that is closed early closes it."""
    with blaming(origin, part, elsewhere):
        items = iter(make())
    try:
        while True:
            with blaming(origin, part, elsewhere):
                item = next(items, _DONE)
            if item is _DONE:
                return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            with blaming(origin, part, elsewhere):
                close()


def blame_order(origin: Origin, part: str, order: EpochOrder) -> EpochOrder:
    """``order``, the object, with faults that name the plugin."""
    kind = type(order)

    def batches(self: EpochOrder, first: int) -> Iterator[Batch]:
        return drawn(origin, f"{part}.batches", lambda: kind.batches(self, first))

    asked = {
        name: blame(origin, f"{part}.{name}", getattr(kind, name)) for name in ("__len__", "is_datas_own")
    }
    return with_methods(order, {**asked, "batches": batches})


def blame_stream(origin: Origin, part: str, wrap: StreamWrapper) -> StreamWrapper:
    """``wrap`` with faults that name the plugin, except those that come from its source."""

    def call(source: Iterator[Batch]) -> Iterator[Batch]:
        upstream: list[BaseException] = []

        def watched() -> Iterator[Batch]:
            try:
                yield from source
            except BaseException as fault:
                upstream.append(fault)
                raise

        return drawn(origin, part, lambda: wrap(watched()), upstream)

    return call


def blame_step(origin: Origin, part: str, wrap: StepWrapper) -> StepWrapper:
    """``wrap`` with faults that name the plugin, except those of the step inside, which it cannot keep to
    itself."""

    @contextmanager
    def call(batch: Batch) -> Iterator[None]:
        with blaming(origin, part):
            manager: AbstractContextManager[None] = wrap(batch)
            manager.__enter__()
        try:
            yield
        except BaseException as fault:
            with blaming(origin, part, elsewhere=(fault,)):
                manager.__exit__(type(fault), fault, fault.__traceback__)
            raise
        else:
            with blaming(origin, part):
                manager.__exit__(None, None, None)

    return call
