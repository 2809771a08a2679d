"""Loops over long arrays, compiled: other threads of Python go on while one runs, and wait for it once.

A chain of numpy calls does the same work, but lets go of Python's lock and asks for it again in each of them,
which takes longer than the work where several threads run Python, as beside a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def compiled(loop: F) -> F:
    """``loop`` as machine code, made by numba at its first call with arguments of these types (about half a
    second) and kept on disk for later runs.

    It takes numpy arrays and numbers, and calls nothing but numpy and what numba knows. Nothing checks its
    indices: whoever calls it has.
    """
    made: Callable[..., Any] | None = None

    @wraps(loop)
    def call(*arguments: Any) -> Any:
        nonlocal made
        if made is None:
            made = _compiled(loop)
        return made(*arguments)

    return cast(F, call)


def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    from numba import njit  # here, since runs with resident tables do without it

    try:
        made: Callable[..., Any] = njit(loop, nogil=True, cache=True)
    except RuntimeError:  # neither the folder of the loop's file nor the user's cache can be written
        made = njit(loop, nogil=True)
    return made
