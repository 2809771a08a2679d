"""Parts that core hands on or only begins, as iterators, contexts and callbacks; their faults, too, name the
plugin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import isfunction
from typing import TYPE_CHECKING, Any, TypeVar

from recpipe.plugin.api import EpochOrder, StepWrapper, StreamWrapper
from recpipe.plugin.calls import Origin, blame, blamed, blaming, with_methods
from recpipe.plugin.errors import PluginError

if TYPE_CHECKING:
    import lightning as L

    from recpipe.plugin.batch import Batch

R = TypeVar("R")
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
