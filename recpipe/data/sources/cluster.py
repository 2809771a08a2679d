"""Work of many machines: a Ray Data job whose results come back in order, so that it makes no difference
where they were made."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from recpipe.common.saved import Damaged, entries, parse_json
from recpipe.errors import BadRow, DataError, UserError, shown

if TYPE_CHECKING:
    import pyarrow as pa

P = TypeVarTuple("P")
T = TypeVar("T")
LOCAL = "local"
"""The address for which a cluster is started on this machine, for as long as the work takes."""
FAULTS = {kind.__name__: kind for kind in (BadRow, DataError, UserError)}
"""The errors that a worker may send."""


def in_order(
    work: Callable[[*P], Iterable[bytes]],
    read: Callable[[bytes], T],
    parts: Sequence[tuple[*P]],
    address: str,
) -> Iterator[T]:
    """What ``work`` gives for each of ``parts``, which are its arguments, in their order; the workers of the
    Ray cluster at ``address`` do it (``auto``: of the one that runs here), and here it is ``read``. The first
    ``UserError`` in that order is raised. ``DataError`` for what cannot be read (``ValueError``).

    Ray Data holds back workers whose results wait, so that memory does not grow with ``parts``.
    """

    def give(numbers: pa.Table) -> Iterator[pa.Table]:
        for number in numbers["part"].to_pylist():
            try:
                for made in work(*parts[number]):
                    yield _answer(made, None)
            except UserError as error:
                yield _answer(None, _told(error))

    with _connected(address) as data:
        numbers = data.from_items([{"part": n} for n in range(len(parts))], override_num_blocks=len(parts))
        answers = numbers.map_batches(give, batch_size=1, batch_format="pyarrow")
        for batch in answers.iter_batches(batch_size=1, batch_format="pyarrow"):
            for made, fault in zip(batch["made"], batch["fault"], strict=True):
                try:
                    found = _error(fault.as_py()) if fault.is_valid else read(made.as_py() or b"")
                except ValueError as damage:
                    raise DataError(
                        f"data.ray={shown(address)}: a worker's answer cannot be read "
                        f"({shown(damage, 200)}); is the same recpipe installed on all its machines?"
                    ) from damage
                if isinstance(found, UserError):
                    raise found
                yield found


def _answer(made: bytes | None, fault: str | None) -> pa.Table:
    import pyarrow as pa

    return pa.table({"made": pa.array([made], pa.large_binary()), "fault": pa.array([fault], pa.string())})


def _told(error: UserError) -> str:
    """What ``_error`` takes."""
    kind = next(kind for kind in type(error).__mro__ if kind.__name__ in FAULTS)
    lines = [error.fault] if isinstance(error, BadRow) else list(error.args)
    return json.dumps({"kind": kind.__name__, "lines": lines})


def _error(told: str) -> UserError:
    """The error that a worker has told."""
    found = entries({"kind": str, "lines": tuple[str, ...]}, parse_json(told))
    if found["kind"] not in FAULTS:
        raise Damaged(f"{found['kind']} is no error that it may have")
    return FAULTS[found["kind"]](*found["lines"])


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
