"""Gradients that are made smaller before a step: by value, by their norm over the dense part, or over all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from recpipe.distributed.ranks import Channel
from recpipe.errors import UserError
from recpipe.tables.group_rows import GroupRows
from recpipe.training.config import TrainerConfig

TINY = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to a norm."""


@dataclass(frozen=True)
class Clipping:
    """``trainer.gradient_clip_val``, and what it limits: each value, or the norm over the dense part or over
    dense part and tables."""

    limit: float
    by_value: bool = False
    over_all: bool = False

    @classmethod
    def of(cls, config: TrainerConfig) -> Clipping | None:
        """That of a recipe; None: nothing is clipped."""
        if config.gradient_clip_val is None:
            return None
        by_value, over_all = config.gradient_clip_algorithm == "value", config.gradient_clip_over == "all"
        if by_value and over_all:
            raise UserError(
                "trainer.gradient_clip_over=all: a norm can be over all, and values are clipped in the dense "
                "part: set trainer.gradient_clip_algorithm=norm, or clip rows by optim.tables.clip_row_norm"
            )
        return cls(config.gradient_clip_val, by_value, over_all)

    def dense(self, parameters: Sequence[nn.Parameter]) -> None:
        """Clip the gradients of ``parameters``."""
        if self.by_value:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clamp(-self.limit, self.limit)
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        scale(parameters, self.share(torch.nn.utils.get_total_norm(gradients)))

    def share(self, norm: torch.Tensor) -> torch.Tensor:
        """By what gradients of this ``norm`` are multiplied, at most 1."""
        return torch.clamp(self.limit / (norm + TINY), max=1.0)

    def of_all(
        self, parameters: Sequence[nn.Parameter], rows: Iterable[GroupRows], trainers: Channel
    ) -> torch.Tensor:
        """By what to multiply the gradients of ``parameters``, which are those of the whole batch, and of the
        ``rows`` that this trainer looks up."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        parts = [torch.nn.utils.get_total_norm(gradients), *(_norm(each, trainers) for each in rows)]
        there = parts[0].device
        return self.share(torch.stack([part.to(there, torch.float32) for part in parts]).norm())


def scale(parameters: Iterable[nn.Parameter], share: torch.Tensor) -> None:
    """Multiply the gradients of ``parameters``. Not in place: autograd may return one tensor for two
    parameters, or an expanded one."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * share.to(parameter.grad.device)


def _norm(rows: GroupRows, trainers: Channel) -> torch.Tensor:
    """The norm of the gradient of a group's rows, each row's summed over its lookups by all trainers."""
    distinct, gradients = rows.gradients()
    if trainers.size > 1:
        dim = gradients.shape[1]
        every = np.concatenate(trainers.gather(distinct))
        sent = trainers.gather(gradients.cpu().contiguous().view(-1).numpy())
        _, place = np.unique(every, return_inverse=True)
        whole = torch.zeros(int(place.max(initial=-1)) + 1, dim)
        gradients = whole.index_add_(
            0, torch.from_numpy(place), torch.from_numpy(np.concatenate(sent)).view(-1, dim)
        )
    norm: torch.Tensor = torch.linalg.vector_norm(gradients)
    return norm
