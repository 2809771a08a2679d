"""Adds several trainers' dense gradients, losses and requests to stop in one message."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from recpipe.distributed.ranks import Channel


def add_up(
    trainers: Channel, parameters: Iterable[nn.Parameter], loss: torch.Tensor, stop: bool
) -> tuple[torch.Tensor, bool]:
    """Replace every gradient by the sum over ``trainers``, in their order: the same bits on each.

    Returns the sum of ``loss`` and whether any trainer was asked to stop.
    """
    if trainers.size == 1:
        return loss, stop
    trained = list(parameters)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    told = torch.tensor([float(loss), float(stop)], dtype=loss.dtype, device=loss.device)
    total = trainers.ordered_sum(torch.cat([g.reshape(-1) for g in gradients] + [told]))
    sizes = [g.numel() for g in gradients]
    for parameter, part in zip(trained, torch.split(total[:-2], sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    return total[-2], bool(total[-1] > 0)
