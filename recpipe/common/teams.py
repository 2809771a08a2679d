"""Compiled loops on the threads that torch's operators run on, OpenMP's, which are one team for both.

After each operator these threads wait for the next one awake, for some milliseconds. Threads of another pool
would be woken on cores that they hold, so that a loop's parts ran one after the other. ``GOMP_parallel`` is
what compilers call for ``#pragma omp parallel``: here each thread of the team takes the next part until none
is left, so that one that comes late holds nobody up.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from recpipe.common import instructions, vectors
from recpipe.common.device import using_threads
from recpipe.common.loops import can_compile, is_compiled, keeping_code, machine_code, shared_spread

NEXT, DONE, COUNT, GIVEN = range(4)
"""Where a team's memory, int64, has what: the next part, how many are done, how many there are; from
``GIVEN`` on two numbers for each argument, and behind these the ends of the parts."""
Kinds = tuple[Any, ...]
"""Of each argument an array's dtype, ``bool`` or ``int``."""


def share_out(loop: Callable[..., None], given: Sequence[Any], ends: Sequence[int]) -> None:
    """``loop(*given, low, high)`` for each two neighbouring ``ends``, a thread for each, the calling one
    among them. ``loop`` is ``compiled``; it takes arrays of one axis, numbers, and two ints."""
    parts = len(ends) - 1
    if parts == 1:
        loop(*given, *ends)
        return
    parallel = _parallel()
    kinds = tuple(each.dtype if isinstance(each, np.ndarray) else type(each) for each in given)
    if parallel is None or not is_compiled(loop) or not can_compile():
        shared_spread(parts).map(partial(loop, *given), ends[:-1], ends[1:])
        return
    words = [0, 0, parts]
    for each in given:
        if isinstance(each, np.ndarray):
            assert each.flags.c_contiguous, "what a loop takes"
            words += (each.ctypes.data, each.size)
        else:
            words += (int(each), 0)
    memory = np.array([*words, *ends], np.int64)
    parallel(_by_team(loop, kinds).address, memory.ctypes.data, parts, 0)
    if memory[DONE] != parts:
        raise MemoryError(f"{loop.__name__}: no memory for {parts} threads")


@cache
def _parallel() -> Any:
    """OpenMP's ``GOMP_parallel``, if torch's operators run on the threads of that library; else None."""
    try:
        library = ctypes.CDLL("libgomp.so.1", os.RTLD_NOW | os.RTLD_NOLOAD)
        parallel, most = library.GOMP_parallel, library.omp_get_max_threads
    except (AttributeError, OSError):
        return None
    for count in (2, 3):
        with using_threads(count):
            if most() != count:
                return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


# -- machine code: what each thread runs ---------------------------------------------------------


def _take_parts(memory: Any) -> None:
    part = next_part(memory)
    while part < count_of(memory):
        loop_of_team(*arguments_of(memory, part))
        part_done(memory)
        part = next_part(memory)


def next_part(memory: Any) -> Any:
    """The number of the next part, which no other thread gets."""


def part_done(memory: Any) -> Any:
    """Count a part that is done; returns how many were before."""


def count_of(memory: Any) -> Any:
    """How many parts there are."""


def arguments_of(memory: Any, part: Any) -> Any:
    """What the loop takes for a part: a tuple."""


def loop_of_team(*arguments: Any) -> None:
    """The loop."""


@cache
def _by_team(loop: Callable[..., None], kinds: Kinds) -> Any:
    """``_take_parts`` with ``loop`` for arguments of these ``kinds``, as a function of C."""
    import numba
    from numba.core import types

    names = {**globals(), **_operations(kinds), loop_of_team.__name__: machine_code(loop)}
    made = FunctionType(_take_parts.__code__, names, f"{loop.__name__}_by_team")
    # numba's cache looks at this file alone whether it has changed, and the loop's code is in this one's.
    files = loop.__wrapped__.__code__.co_filename, vectors.__file__, instructions.__file__  # type: ignore[attr-defined]
    stamps = [(file, Path(file).stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr((stamps, kinds)).encode()).hexdigest()[:12]
    made.__qualname__ = f"{made.__name__}_{digest}"
    kind = types.void(types.voidptr)
    return keeping_code(lambda kept: numba.cfunc(kind, cache=kept)(made))


def _operations(kinds: Kinds) -> dict[str, Any]:
    """What numba is to take the names in ``_take_parts`` for."""
    import numba
    from llvmlite import ir  # numba's
    from numba.core import types
    from numba.extending import intrinsic
    from numba.np.arrayobj import populate_array

    word = ir.IntType(64)
    ends = GIVEN + 2 * len(kinds)

    def of(kind: Any) -> Any:
        if isinstance(kind, np.dtype):
            return numba.from_dtype(kind)[::1]
        return types.boolean if kind is bool else types.int64

    every = [*map(of, kinds), types.int64, types.int64]
    taken = types.BaseTuple.from_types(every)  # type: ignore[no-untyped-call]

    def place(builder: Any, memory: Any, at: Any) -> Any:
        words = builder.bitcast(memory, word.as_pointer())
        return builder.gep(words, [word(at) if isinstance(at, int) else at])

    def add_one(at: int) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.atomic_rmw("add", place(builder, given[0], at), word(1), "acq_rel")

        return intrinsic(lambda _, memory: (types.int64(types.voidptr), code))

    def read_count(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.load(place(builder, given[0], COUNT))

    def read_arguments(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        memory, part = given
        found = []
        for number, kind in enumerate(kinds):
            value, size = (builder.load(place(builder, memory, GIVEN + 2 * number + k)) for k in (0, 1))
            if isinstance(kind, np.dtype):
                array = context.make_array(of(kind))(context, builder)
                start = builder.inttoptr(value, array.data.type)
                filled = (array, start, [size], [word(kind.itemsize)], kind.itemsize, None)
                populate_array(*filled)  # type: ignore[no-untyped-call]
                value = array._getvalue()
            elif kind is bool:
                value = builder.icmp_unsigned("!=", value, word(0))
            found.append(value)
        found += [builder.load(place(builder, memory, builder.add(part, word(ends + k)))) for k in (0, 1)]
        return context.make_tuple(builder, taken, found)

    return {
        next_part.__name__: add_one(NEXT),
        part_done.__name__: add_one(DONE),
        count_of.__name__: intrinsic(lambda _, memory: (types.int64(types.voidptr), read_count)),
        arguments_of.__name__: intrinsic(
            lambda _, memory, part: (taken(types.voidptr, types.int64), read_arguments)
        ),
    }
