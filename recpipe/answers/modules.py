"""Exchanges a module of a model for another one."""

from __future__ import annotations

from torch import nn


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put ``new`` wherever ``model`` holds the module at ``path``."""
    old = model.get_submodule(path)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
