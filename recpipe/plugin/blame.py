"""Faults inside a plugin keep their type and traceback and gain a note that names the plugin."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from recpipe.plugin.api import Origin, StepWrapper, StreamWrapper, TableInfo, TablePolicy

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints

    from recpipe.data.batch import Batch
    from recpipe.tables.collection import TableCollection
    from recpipe.tables.stores.base import ColdStore
    from recpipe.tables.tiers.parts import TierParts
    from recpipe.tables.tiers.policies import CachePolicy, RowSpace

R = TypeVar("R")


@contextmanager
def blaming(origin: Origin, part: str, elsewhere: Container[BaseException] = ()) -> Iterator[None]:
    """Add the note to what the body raises, but for faults that came from ``elsewhere``."""
    try:
        yield
    except Exception as fault:
        if fault not in elsewhere:
            fault.add_note(f"raised inside plugin {origin}, part {part}")
        raise


def blame(origin: Origin, part: str, fn: Callable[..., R]) -> Callable[..., R]:
    """``fn``, whose faults name the plugin."""

    def call(*args: object) -> R:
        with blaming(origin, part):
            return fn(*args)

    return call


def blame_stream(origin: Origin, part: str, wrap: StreamWrapper) -> StreamWrapper:
    """``wrap``, whose iterator's own faults name the plugin; those of its source do not."""

    def call(source: Iterator[Batch]) -> Iterator[Batch]:
        upstream: list[BaseException] = []

        def watched() -> Iterator[Batch]:
            try:
                yield from source
            except Exception as fault:
                upstream.append(fault)
                raise

        with blaming(origin, part, elsewhere=upstream):
            yield from wrap(watched())

    return call


def blame_step(origin: Origin, part: str, wrap: StepWrapper) -> StepWrapper:
    """``wrap``, whose faults on entry and exit name the plugin; those of the step itself do not."""

    @contextmanager
    def call(batch: Batch) -> Iterator[None]:
        with blaming(origin, part):
            manager: AbstractContextManager[None] = wrap(batch)
            manager.__enter__()
        try:
            yield
        except BaseException as fault:
            with blaming(origin, part, elsewhere=(fault,)):
                if not manager.__exit__(type(fault), fault, fault.__traceback__):
                    raise
        else:
            with blaming(origin, part):
                manager.__exit__(None, None, None)

    return call


class BlamedPolicy(TablePolicy):
    """A table policy whose faults name the plugin."""

    def __init__(self, origin: Origin, policy: TablePolicy) -> None:
        self.origin = origin
        self.policy = policy

    def constrain(self, name: str, table: TableInfo) -> ParameterConstraints | None:
        with blaming(self.origin, "tables.constrain"):
            return self.policy.constrain(name, table)

    def rewrite(self, module: nn.Module, tables: Sequence[str]) -> nn.Module:
        with blaming(self.origin, "tables.rewrite"):
            return self.policy.rewrite(module, tables)

    def data_type(self, name: str) -> str | None:
        with blaming(self.origin, "tables.data_type"):
            return self.policy.data_type(name)

    def cache(self, space: RowSpace) -> CachePolicy:
        with blaming(self.origin, "tables.cache"):
            return self.policy.cache(space)

    def store(self, store: ColdStore) -> ColdStore:
        with blaming(self.origin, "tables.store"):
            return self.policy.store(store)

    def collection(self, parts: TierParts) -> TableCollection | None:
        with blaming(self.origin, "tables.collection"):
            return self.policy.collection(parts)
