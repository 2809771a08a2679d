"""The parts of what a model returns, and of a batch of any type, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from recpipe.errors import UserError, nearest_or_all, shown


def described(output: object) -> str:
    """What a model returns, for messages."""
    if isinstance(output, Mapping):
        return f"a mapping of {', '.join(map(str, output))}"
    return f"{len(output)} values" if isinstance(output, list | tuple) else f"a {type(output).__name__}"


def is_tensor(found: object) -> bool:
    """Whether it is a tensor of any shape."""
    return isinstance(found, torch.Tensor)


def sole(output: Any) -> Any:
    """The one thing that ``output`` has; None if there are several."""
    if isinstance(output, Mapping):
        return next(iter(output.values())) if len(output) == 1 else None
    if isinstance(output, list | tuple):
        if len(output) == 3 and is_scalar(output[0]):  # TorchRec's DLRMTrain: (loss, logits, labels)
            return output[1]
        return output[0] if len(output) == 1 else None
    return output


REMEDY = "return a tensor [B] or [B, 1], (loss, such a tensor), or say which part it is: model.prediction=KEY"


def is_scalar(value: Any) -> bool:
    """Whether it is a 0-dim tensor."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


ABSENT = object()
"""Stands for a part that is not there."""


def part_of(value: Any, name: str) -> Any:
    """The entry or attribute of that name; ``ABSENT`` if there is none, or a method."""
    if isinstance(value, Mapping):
        return value.get(name, ABSENT)
    found = getattr(value, name, ABSENT)
    return ABSENT if callable(found) else found


def names_of(value: Any) -> list[str]:
    """The names of the parts of ``value``."""
    if isinstance(value, Mapping):
        return [*map(str, value)]
    return [n for n in dir(value) if not n.startswith("_") and part_of(value, n) is not ABSENT]


def keyed(output: Any, key: str) -> Any:
    """The part of ``output`` that ``model.prediction`` names; ``UserError`` if it has none."""
    if isinstance(output, list | tuple) and key.isdecimal() and int(key) < len(output):
        return output[int(key)]
    found = part_of(output, key)
    if found is not ABSENT:
        return found
    names = [*map(str, range(len(output)))] if isinstance(output, list | tuple) else names_of(output)
    raise UserError(
        f"model.prediction={shown(key)}: the model's output has no such part; {nearest_or_all(key, names)}"
    )
