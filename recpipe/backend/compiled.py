"""torch.compile for the dense part of a placed model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from recpipe.errors import UserError, shown
from recpipe.tables.proxy import CollectionProxy

log = logging.getLogger(__name__)


def compile_dense(module: nn.Module, arguments: dict[str, Any]) -> list[str]:
    """Let ``torch.compile`` make, in place, the largest parts of ``module`` that hold no tables, from their
    first call on; returns their paths. Names and values of parameters stay as they are.

    Rows are handed out by Python, which a compiled program could not call.
    """
    compiled = []
    for path, part in _without_tables(module, ""):
        try:
            part.compile(**arguments)
        except (RuntimeError, TypeError, ValueError) as fault:
            said = f"torch.compile does not take {arguments}: {shown(fault, 200)}"
            raise UserError(f"trainer.compile: {said}") from fault
        compiled.append(path)
    log.info("torch.compile makes %s", ", ".join(compiled) or "nothing: no part of the model holds no tables")
    return compiled


def _without_tables(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The largest parts of ``module`` that can be called and hold no tables."""
    if isinstance(module, CollectionProxy):
        return
    tables = any(isinstance(member, CollectionProxy) for member in module.modules())
    lists = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if path and not tables and not lists:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _without_tables(child, f"{path}.{name}" if path else name)
