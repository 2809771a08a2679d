"""Modules that note something at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PlainAttributes(nn.Module):
    """A module whose attributes that are neither tensors nor modules are set as those of any object.

    ``nn.Module`` looks at each value whether it is a parameter, a buffer or a module, which takes longer than
    all else that is done with a number. It comes first among the base classes.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and not isinstance(value, torch.Tensor | nn.Module):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)
