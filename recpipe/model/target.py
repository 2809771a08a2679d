"""Imports the class that ``model._target_`` names, with a one-line error for each way in which this can
fail."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from recpipe.errors import UserError, did_you_mean, shown

LONGEST = 300
"""Characters of a fault's text that a message echoes."""


def locate(path: str, key: str) -> Any:
    """Import what ``package.module.Class`` names; ``UserError``, naming ``key``, if that fails."""
    found: Any = None
    name = ""
    for part in path.split("."):
        if not name:
            found = _imported(part, path, key)
        elif not hasattr(found, part):
            found = _submodule(found, name, part, path, key)
        else:
            found = getattr(found, part)
        name = f"{name}.{part}".lstrip(".")
    return found


def _submodule(parent: Any, name: str, part: str, path: str, key: str) -> ModuleType:
    folders = getattr(parent, "__path__", [])
    if folders and find_spec(f"{name}.{part}"):  # also for a folder without __init__.py
        return _imported(f"{name}.{part}", path, key)
    inside = [module.name for module in pkgutil.iter_modules(folders)]
    public = [word for word in dir(parent) if not word.startswith("_")]
    raise UserError(f"{key}={path}: {name} has no '{part}'.{did_you_mean(part, [*public, *inside])}")


def _imported(name: str, path: str, key: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as fault:
        if fault.name != name:
            raise UserError(f"{key}={path}: cannot import {name}: {told(fault, name)}") from fault
        hint = did_you_mean(name, _modules_here())
        raise UserError(
            f"{key}={path}: there is no module '{name}'.{hint} It is looked for "
            "in the current directory and among installed packages"
        ) from fault
    except Exception as fault:
        raise UserError(f"{key}={path}: cannot import {name}: {told(fault, name)}") from fault


def _modules_here() -> list[str]:
    return [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]


def told(fault: BaseException, module: str) -> str:
    """Type, text and place of ``fault``: the innermost line in the top-level package of ``module``."""
    text = " ".join(str(fault).split())
    said = f"{type(fault).__name__}: {shown(text, LONGEST)}" if text else type(fault).__name__
    if isinstance(fault, SyntaxError):
        return f"{said} ({fault.filename}, line {fault.lineno})"
    frames = list(walk_tb(fault.__traceback__))
    top = module.partition(".")[0]
    own = [at for at in frames if str(at[0].f_globals.get("__name__", "")).partition(".")[0] == top]
    if not own:
        return said
    frame, line = own[-1]
    return f"{said} ({frame.f_code.co_filename}, line {line})"
