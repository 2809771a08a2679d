"""How many Python functions a call runs: what an interpreter costs a step, on any machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


def python_calls(run: Callable[[], object]) -> int:
    """Calls of Python functions, in this thread, while ``run`` runs."""
    return sum(calls_by_name(run).values())


def calls_by_name(run: Callable[[], object]) -> Counter[str]:
    """Those calls by the functions' names; a method whose first argument is ``ctx`` is ``NAME(ctx)``."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            on_ctx = code.co_argcount > 0 and code.co_varnames[0] == "ctx"
            found[f"{code.co_name}(ctx)" if on_ctx else code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found
