"""Work of many machines: a Ray Data job whose results come back in order, so that it makes no difference
where they were made."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from recpipe.errors import BadRow, DataError, UserError, shown

if TYPE_CHECKING:
    import pyarrow as pa

P = TypeVarTuple("P")
T = TypeVar("T")
LOCAL = "local"
"""The address for which a cluster is started on this machine, for as long as the work takes."""


def in_order(work: Callable[[*P], Iterable[T]], parts: Sequence[tuple[*P]], address: str) -> Iterator[T]:
    """What ``work`` gives for each of ``parts``, which are its arguments, in their order; the workers of the
    Ray cluster at ``address`` do it (``auto``: of the one that runs here). The first ``UserError`` in that
    order is raised.

    Ray Data holds back workers whose results wait, so that memory does not grow with ``parts``.
    """

    def give(numbers: pa.Table) -> Iterator[pa.Table]:
        for number in numbers["part"].to_pylist():
            try:
                for made in work(*parts[number]):
                    yield _packed(made)
            except UserError as error:
                yield _packed(_Fault(error))

    with _connected(address) as data:
        numbers = data.from_items([{"part": n} for n in range(len(parts))], override_num_blocks=len(parts))
        made = numbers.map_batches(give, batch_size=1, batch_format="pyarrow")
        for batch in made.iter_batches(batch_size=1, batch_format="pyarrow"):
            for content in batch["made"]:
                found = pickle.loads(content.as_py())
                if isinstance(found, _Fault):
                    raise found.error()
                yield found


class _Fault:
    """An error on its way from a worker."""

    def __init__(self, error: UserError) -> None:
        self.kind, self.text = type(error), error.fault if isinstance(error, BadRow) else str(error)

    def error(self) -> UserError:
        """The same error."""
        return self.kind(self.text)


def _packed(made: object) -> pa.Table:
    import pyarrow as pa

    return pa.table({"made": pa.array([pickle.dumps(made)], pa.large_binary())})


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """``ray.data``, connected to a cluster; a connection that the caller has is used and kept."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(f"data.ray={shown(address)}: needs Ray: pip install 'recpipe[ray]'") from error
    own = not ray.is_initialized()
    if own:
        started: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **started)
        except Exception as error:  # of many types
            raise UserError(f"data.ray={shown(address)}: no cluster there ({shown(error, 200)})") from error
    context = ray.data.DataContext.get_current()
    before = context.execution_options.preserve_order, context.enable_progress_bars
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    try:
        yield ray.data
    except ray.exceptions.RayError as error:
        raise DataError(f"data.ray={shown(address)}: the work ended early ({shown(error, 200)})") from error
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars = before
        if own:
            ray.shutdown()
