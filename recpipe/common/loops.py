"""Work on long arrays beside a thread that trains: loops compiled to machine code, during which other threads
of Python go on, and numpy calls spread over threads.

A chain of numpy calls does the same work as a loop, but lets go of Python's lock and asks for it again in
each of them, which takes longer than the work where several threads run Python, as beside a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, update_wrapper
from inspect import signature
from itertools import pairwise, product
from pathlib import Path
from types import FunctionType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from recpipe.common.console import log
from recpipe.common.instructions import instructions
from recpipe.common.own_cache import CACHE_HOME, own_folder, private_files, user_cache_dir
from recpipe.common.process import SPREAD
from recpipe.common.vectors import vectors
from recpipe.errors import UserError, shown

if TYPE_CHECKING:
    import torch

NUMBA = "NUMBA_CACHE_DIR"
"""numba's variable for the folder of what it compiles; not set: one beside recpipe's other caches."""
TOLD: list[Callable[[str, float, Sequence[Any]], None]] = []
"""What is told of loops that stand in place of torch's operators, as they are called: the kind of a loop, how
many multiplications it makes, and its tensors, the result last. So what watches operators sees them."""
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
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


def tell(kind: str, work: float, *tensors: Any) -> None:
    """Tell who is ``TOLD`` of a loop."""
    for told in TOLD:
        told(kind, work, tensors)


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


@cache
def can_compile() -> bool:
    """Whether loops become machine code here; why not is logged."""
    try:
        return not _numba().config.DISABLE_JIT
    except UserError as fault:
        log.warning("%s", fault)
        return False


@cache
def has_wide_registers() -> bool:
    """Whether loops are compiled for a processor with 32 registers of 16 numbers (AVX-512), not 16 of 8."""
    numba = _numba()
    features = numba.config.CPU_FEATURES  # numba's own variables name another processor than this one
    if features is None:
        from llvmlite.binding import get_host_cpu_features

        features = get_host_cpu_features().flatten()
    return "+avx512f" in features


def load(*loops: Callable[..., Any]) -> None:
    """Load the machine code of these ``compiled`` loops, or make it."""
    for loop in loops:
        cast(_Loop, loop).load()


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether it is a ``compiled`` loop."""
    return isinstance(function, _Loop)


def machine_code(loop: Callable[..., Any]) -> Any:
    """numba's form of a ``compiled`` loop."""
    return cast(_Loop, loop).made


def keeping_code(make: Callable[[bool], T]) -> T:
    """What ``make`` makes of numba's, told whether numba is to keep the machine code: in a folder that nobody
    else can write, if there is one."""
    numba = _numba()
    folder = _folder(os.environ.get(NUMBA), user_cache_dir())
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = folder or before
    try:
        with private_files():
            return make(folder is not None)
    except RuntimeError:  # the disk is full
        return make(False)
    finally:
        numba.config.CACHE_DIR = before


def cut(length: int, least: int, most: int) -> list[int]:
    """The ends, 0 the first, of at most ``most`` parts of [0, ``length``) of ``least`` elements or more."""
    count = max(1, min(most, length // least))
    return [length * part // count for part in range(count + 1)]


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
        return keeping_code(lambda kept: numba.njit(loop, nogil=True, cache=kept))

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
    for known in (instructions, vectors):
        if any(getattr(called, "__module__", None) == known.__module__ for called in found.values()):
            own |= {name: known()[called] for name, called in found.items() if _is_in(called, known())}
    if not own:
        return function
    names, defaults = function.__globals__ | own, function.__defaults__
    again = FunctionType(function.__code__, names, function.__name__, defaults, function.__closure__)
    update_wrapper(again, function)
    return again


def _is_in(called: object, known: dict[Any, Any]) -> bool:
    return isinstance(called, FunctionType) and called in known


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
        self._others = ThreadPoolExecutor(count - 1, SPREAD) if count > 1 else None

    @classmethod
    def beside(cls, device: torch.device) -> Spread:
        """For planning batches of ``device``: a quarter of the cores, at most 4, where a GPU trains. Where
        the cores train, planning has one."""
        cores = len(os.sched_getaffinity(0)) if device.type == "cuda" else 1
        return cls(min(4, max(1, cores // 4)))

    def parts(self, length: int, least: int | None = None) -> list[slice]:
        """[0, ``length``) in parts of ``least`` (``LEAST``) elements or more, at most one for each thread."""
        ends = cut(length, LEAST if least is None else least, self.count)
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


@cache
def shared_spread(count: int) -> Spread:
    """``count`` threads that all of this process's work shares."""
    return Spread(count) if count > 1 else ALONE


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared_spread.cache_clear)  # which has none of its parent's threads
