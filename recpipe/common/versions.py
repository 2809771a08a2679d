"""Releases of torch, TorchRec and FBGEMM that fit together, and a one-line error if a release lacks a
name."""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recpipe.errors import UserError

TRIPLES = (("2.14", "1.9", "1.9"), ("2.13", "1.8", "1.8"), ("2.11", "1.6", "1.6"))
"""(torch, torchrec, fbgemm-gpu) releases that fit together, major.minor, newest first."""
FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_DISTRIBUTIONS = {"torch": ("torch",), "torchrec": ("torchrec",), "fbgemm_gpu": FBGEMM}
"""The distributions that bring each top-level package."""


def installed_version(name: str) -> str | None:
    """Version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> str:
    """Installed releases of recpipe and of what it stands on, in one line; nothing is imported."""
    found = {name: installed_version(name) for name in ("torch", "torchrec", *FBGEMM)}
    others = [f"{name} {version}" for name, version in found.items() if version]
    own = f"recpipe {installed_version('recpipe') or '(not installed)'}"
    return ", ".join([own, *others, f"Python {platform.python_version()}"])


@contextmanager
def private_names() -> Iterator[None]:
    """For a block that uses private names of torch, TorchRec or FBGEMM.

    Raises ``UserError`` if the installed release lacks one of them. Other faults pass.
    """
    try:
        yield
    except ImportError as fault:
        if isinstance(fault, ModuleNotFoundError):
            _explain(f"{fault.name}", fault)
        # In Python 3.11 only the message has the name that the module lacks.
        elif found := re.match("cannot import name '(.+?)' from", str(fault)):
            _explain(f"{fault.name}.{found[1]}", fault)
        raise
    except AttributeError as fault:
        owner = fault.obj
        if hasattr(owner, "__name__") and not isinstance(owner, type):  # a module
            _explain(f"{owner.__name__}.{fault.name}", fault)
        else:
            for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
                _explain(f"{base.__module__}.{base.__qualname__}.{fault.name}", fault)
        raise


def private(owner: Any, name: str) -> Any:
    """The private attribute ``name`` of ``owner``; ``UserError`` if the installed release lacks it."""
    with private_names():
        return getattr(owner, name)


def _explain(missing: str, fault: Exception) -> None:
    """Raise a ``UserError`` if ``missing``, a dotted name, belongs to one of the three packages."""
    names = _DISTRIBUTIONS.get(missing.partition(".")[0], ())
    found = next(((n, v) for n in reversed(names) if (v := installed_version(n)) is not None), None)
    if found is None:
        return
    known = ", or ".join(f"torch {t} with torchrec {r} and fbgemm-gpu {f}" for t, r, f in TRIPLES)
    raise UserError(
        f"{found[0]} {found[1]} has no {missing}, which recpipe uses. It is known to work with {known}; "
        "'recpipe doctor' names the command that installs them"
    ) from fault
