"""Work on long arrays beside a thread that trains: loops compiled to machine code, during which other threads
of Python go on, and numpy calls spread over threads.

A chain of numpy calls does the same work as a loop, but lets go of Python's lock and asks for it again in
each of them, which takes longer than the work where several threads run Python, as beside a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, update_wrapper
from inspect import signature
from itertools import pairwise, product
from pathlib import Path
from types import FunctionType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from recpipe.common.console import log
from recpipe.common.own_cache import CACHE_HOME, own_folder, private_files, user_cache_dir
from recpipe.errors import UserError, shown

if TYPE_CHECKING:
    import torch

NUMBA = "NUMBA_CACHE_DIR"
"""numba's variable for the folder of what it compiles; not set: one beside recpipe's other caches."""
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
LANES = 8
"""Numbers that ``alike`` compares."""
LEAST = 1 << 16
"""A part has at least so many elements; passing one to a thread takes as long as work on some thousands."""
LEAST_COPIED = 1 << 19
"""The same of what is only copied. Each thread asks for Python's lock several times, for which the training's
thread then waits: that takes longer than to copy a part of a smaller array."""


def compiled(loop: F) -> F:
    """``loop`` as machine code, which numba makes and keeps on disk for later runs.

    It takes arrays and numbers, of the types that its annotations say if ``load_loops`` is to load it (others
    take half a second at their first call), and calls nothing but numpy and plain functions of its own file
    that do no more than that. Nothing checks its indices: whoever calls it has.
    """
    return cast(F, update_wrapper(_Loop(loop), loop))


def prefetch(array: Any, index: Any) -> None:
    """In a ``compiled`` loop: let the processor read ``array[index]`` meanwhile, which the loop will need."""


def word(array: Any, index: Any) -> Any:
    """In a ``compiled`` loop: the 8 bytes of a uint8 ``array`` from ``index`` on, uint64."""
    return array[index : index + 8].view(np.uint64)[0]


def put_word(array: Any, index: Any, number: Any) -> None:
    """In a ``compiled`` loop: write a uint64 over 8 bytes of a uint8 ``array`` from ``index`` on."""
    array[index : index + 8].view(np.uint64)[0] = number


def alike(array: Any, index: Any, wanted: Any, differ: Any) -> Any:
    """In a ``compiled`` loop: which of the ``LANES`` numbers of a uint32 ``array`` from ``index`` on are
    ``wanted``, but for some of the bits of ``differ``, which are the lowest ones: a uint64 whose lowest bit
    is that of the first number. One instruction of a vector unit compares them all."""
    found = array[index : index + LANES] ^ np.uint32(wanted) <= np.uint32(differ)
    return np.uint64(sum(int(same) << lane for lane, same in enumerate(found)))


def lowest_bit(bits: Any) -> Any:
    """In a ``compiled`` loop: the place of the lowest bit of a uint64 that is 1; 64 if none is."""
    found = int(bits) | 1 << 64
    return np.uint64((found & -found).bit_length() - 1)


def at_hand() -> bool:
    """Whether loops can be called without waiting for numba's import."""
    return "numba" in sys.modules


def load_loops() -> None:
    """Load the machine code of all loops there are now, or make it, so that no batch waits for that."""
    said = False
    while _WAITING:
        found = _WAITING.pop().load()
        if not found and not said:
            said = True
            log.info("compiling loops for this machine, once")


class _Loop:
    def __init__(self, loop: Callable[..., Any]) -> None:
        self.loop = loop
        _WAITING.append(self)

    def __call__(self, *arguments: Any) -> Any:
        if "made" in vars(self):
            return self.made(*arguments)
        with private_files():  # the first call writes machine code
            return self.made(*arguments)

    @cached_property
    def made(self) -> Any:
        """numba's form of it."""
        numba = _numba()
        if numba.config.DISABLE_JIT:  # numba's own switch, for debugging: loops stay Python
            return self.loop
        loop = _with_its_functions(cast(FunctionType, self.loop))
        folder = _folder(os.environ.get(NUMBA), user_cache_dir())
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = folder or before
        try:
            return numba.njit(loop, nogil=True, cache=folder is not None)
        except RuntimeError:  # the disk is full
            return numba.njit(loop, nogil=True)
        finally:
            numba.config.CACHE_DIR = before

    def load(self) -> bool:
        """Make it ready for arguments of the types that its annotations say; whether that was found on
        disk."""
        numba = _numba()
        if numba.config.DISABLE_JIT:
            return True

        def of(kind: Any) -> Any:
            if isinstance(kind, np.dtype):
                return numba.from_dtype(kind)[::1]
            return numba.types.boolean if kind is bool else numba.types.int64

        with private_files():
            for kinds in _argument_types(self.loop):
                self.made.compile(tuple(map(of, kinds)))
        return not self.made.stats.cache_misses


@cache
def _folder(named: str | None, caches: Path) -> str | None:
    """Where machine code is kept, in ``named`` or else in ``caches``; None if it cannot be written.
    ``UserError`` if somebody else can have put something there."""
    path = Path(named) / "recpipe" if named else caches / "numba"
    try:
        own_folder(path, NUMBA if named else CACHE_HOME)
    except OSError:
        return None
    return str(path) if os.access(path, os.W_OK) else None


def _with_its_functions(function: FunctionType) -> FunctionType:
    """``function`` with machine code of the functions of its file that it calls, and that they call."""
    found = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    own = {
        name: _numba().njit(_with_its_functions(called))
        for name, called in found.items()
        if isinstance(called, FunctionType) and called.__module__ == function.__module__
    }
    own |= {
        name: _instructions()[called]
        for name, called in found.items()
        if isinstance(called, FunctionType) and called in _instructions()
    }
    if not own:
        return function
    names, defaults = function.__globals__ | own, function.__defaults__
    again = FunctionType(function.__code__, names, function.__name__, defaults, function.__closure__)
    update_wrapper(again, function)
    return again


@cache
def _instructions() -> dict[Any, Any]:
    """``prefetch``, ``word``, ``put_word``, ``alike`` and ``lowest_bit`` as the processor's instructions,
    which numba has no names for: bytes at any address are one number to it, or a vector of them."""
    _numba()
    from llvmlite import ir  # numba's
    from numba.core.types import uint64, void
    from numba.extending import intrinsic

    bit, byte, number, wide = (ir.IntType(width) for width in (1, 8, 32, 64))
    vector = ir.VectorType(number, LANES)
    unset, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(number, LANES), [0] * LANES)

    def place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.gep(array.data, [arguments[1]])

    def fetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = builder.bitcast(place(context, builder, signature, arguments), byte.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [where.type, number, number, number])
        known = builder.module.globals.get("llvm.prefetch.p0")
        called = known or ir.Function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(called, [where, number(0), number(3), number(1)])  # to read, and keep it, as data
        return context.get_dummy_value()

    def read(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = place(context, builder, signature, arguments)
        found = builder.load(builder.bitcast(where, wide.as_pointer()))
        found.align = 1
        return found

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = place(context, builder, signature, arguments)
        builder.store(arguments[2], builder.bitcast(where, wide.as_pointer()), align=1)
        return context.get_dummy_value()

    def compare(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def in_each(scalar: Any) -> Any:
            one = builder.insert_element(unset, builder.trunc(scalar, number), number(0))
            return builder.shuffle_vector(one, unset, first)

        where = place(context, builder, signature, arguments)
        found = builder.load(builder.bitcast(where, vector.as_pointer()))
        found.align = 4
        other = builder.xor(found, in_each(arguments[2]))
        same = builder.icmp_unsigned("<=", other, in_each(arguments[3]))
        return builder.zext(builder.bitcast(same, ir.IntType(LANES)), wide)

    def zeros(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], bit(0))

    return {
        alike: intrinsic(lambda _, array, at, one, low: (uint64(array, at, uint64, uint64), compare)),
        lowest_bit: intrinsic(lambda _, bits: (uint64(uint64), zeros)),
        prefetch: intrinsic(lambda _, array, index: (void(array, index), fetch)),
        word: intrinsic(lambda _, array, index: (uint64(array, index), read)),
        put_word: intrinsic(lambda _, array, index, given: (void(array, index, uint64), write)),
    }


def _numba() -> Any:
    try:
        import numba  # here, since runs with resident tables and ids that are rows do without it
    except ImportError as fault:  # it refuses a numpy that is newer than it is
        raise UserError(
            f"numba, which compiles loops, cannot be imported ({shown(fault, 200)}): pip install -U numba"
        ) from fault
    return numba


_WAITING: list[_Loop] = []
"""Loops that have not been loaded."""


def _argument_types(loop: Callable[..., Any]) -> Iterator[tuple[Any, ...]]:
    """What ``loop``'s annotations allow: for each argument ``bool``, ``int`` or an array's dtype. Nothing if
    one of them says something else."""
    hints = get_type_hints(loop)
    return product(*(_kinds(hints.get(name)) for name in signature(loop).parameters))


def _kinds(hint: Any) -> list[Any]:
    if isinstance(hint, UnionType):
        return [kind for each in get_args(hint) for kind in _kinds(each)]
    if hint in (bool, int):
        return [hint]
    alias = getattr(get_origin(hint), "__value__", None)  # NumPy 2.5's NDArray is made by "type NDArray[T] ="
    if alias is not None:
        return _kinds(alias[get_args(hint)])
    if get_origin(hint) is not np.ndarray:
        return []
    _, dtype = get_args(hint)
    return [np.dtype(*get_args(dtype))]


class Spread:
    """``count`` threads, the calling one among them; with 1, everything runs in the calling one."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._others = ThreadPoolExecutor(count - 1, "recpipe-spread") if count > 1 else None

    @classmethod
    def beside(cls, device: torch.device) -> Spread:
        """For planning batches of ``device``: a quarter of the cores, at most 4, where a GPU trains. Where
        the cores train, planning has one."""
        cores = len(os.sched_getaffinity(0)) if device.type == "cuda" else 1
        return cls(min(4, max(1, cores // 4)))

    def parts(self, length: int, least: int | None = None) -> list[slice]:
        """[0, ``length``) in parts of ``least`` (``LEAST``) elements or more, at most one for each thread."""
        count = max(1, min(self.count, length // (LEAST if least is None else least)))
        ends = [length * part // count for part in range(count + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def map(self, work: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        """``work`` for the first ones of ``arguments``, for the second ones, and so on, at the same time."""
        calls = list(zip(*arguments, strict=True))
        if self._others is None or len(calls) < 2:
            return [work(*call) for call in calls]
        others = [self._others.submit(work, *call) for call in calls[1:]]
        first = work(*calls[0])
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        """End the threads."""
        if self._others is not None:
            self._others.shutdown()


ALONE = Spread()
"""The calling thread alone."""
