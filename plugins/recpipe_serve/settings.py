"""Triton's settings of traces and of logs: a server tells what they are, and its own words change them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from recpipe.errors import shown
from recpipe_serve.errors import Refused

log = logging.getLogger("recpipe")
TRACES = "traces= of recpipe serve and OTEL_TRACES_SAMPLER of its environment say which requests are traced"
LOGS = "the log goes to the server's standard error, whose lines whoever starts it may filter"


def trace_settings(traces: bool) -> dict[str, list[str]]:
    """Triton's trace settings of a server whose word ``traces`` is this one."""
    return {"trace_level": ["TIMESTAMPS" if traces else "OFF"], "trace_mode": ["opentelemetry"]}


def log_settings() -> dict[str, bool | int | str]:
    """Triton's log settings, as this process logs."""
    levels = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
    told: dict[str, bool | int | str] = {name: log.isEnabledFor(level) for name, level in levels.items()}
    return {"log_file": "", **told, "log_verbose_level": 0, "log_format": "default"}


def require_unchanged(told: Mapping[str, Any], asked: Mapping[str, Any], instead: str) -> None:
    """``Refused`` (501) unless the settings ``asked`` for are those that are ``told``; None, by which a
    client goes back to what the server began with, always is. ``instead``: what changes them."""
    for name, value in asked.items():
        if value is not None and (name not in told or _texts(value) != _texts(told[name])):
            raise Refused(501, "settings", f"{shown(name)} is not changed from afar: {instead}")


def _texts(value: Any) -> list[str]:
    """A setting's values: the protocols have them as they are, as text, or as a list of these."""
    return [str(own) for own in (value if isinstance(value, list) else [value])]
