"""The units of HSTU: attention without a softmax, over the events of a history."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recpipe.models.histories import History, up_to_each


class Unit(nn.Module):
    """One unit over N tokens: silu(Q K^T + bias) V / N without a softmax, normalized, times a gate U, through
    a linear layer and added to the tokens."""

    def __init__(self, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.heads, self.dim = tokens, heads, width // heads
        self.norm, self.found_norm = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.project, self.joined = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.places = nn.Parameter(0.02 * torch.randn(tokens))

    def forward(self, tokens: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """float32 [B, n, width] of the latest n <= N tokens, of which each sees those that are ``seen``, bool
        [B, n, n]."""
        u, v, q, k = F.silu(self.project(self.norm(tokens))).chunk(4, dim=2)
        apart = (*tokens.shape[:2], self.heads, self.dim)
        q, k, v = (each.reshape(apart).transpose(1, 2) for each in (q, k, v))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        bias = self.places[(places.unsqueeze(1) - places).clamp(min=0)]
        weights = F.silu(q @ k.transpose(2, 3) + bias) / self.tokens * seen.unsqueeze(1)
        found = self.found_norm((weights @ v).transpose(1, 2).flatten(2))
        joined: torch.Tensor = tokens + self.joined(found * u)
        return joined


class Transducer(nn.Module):
    """Units over a history's events and, if asked for, the target after them: the last token's state."""

    def __init__(self, tokens: int, event: int, width: int, heads: int, units: int, recompute: bool) -> None:
        """``recompute``: whether the backward pass computes units again, of which inputs alone are kept."""
        super().__init__()
        self.recompute = recompute
        # With a bias: norms would else make as much of rows that are hardly trained as of others.
        self.enter = nn.Linear(event, width)
        self.units = nn.ModuleList(Unit(tokens, width, heads) for _ in range(units))
        self.norm = nn.LayerNorm(width)

    def states(self, events: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Of each token, float32 [B, N, width]; ``events``: [B, N, E], ``present``: bool [B, N]."""
        tokens, seen = self.enter(events), up_to_each(present)
        for unit in self.units:
            if self.recompute and torch.is_grad_enabled():
                tokens = checkpoint(unit, tokens, seen, use_reentrant=False)
            else:
                tokens = unit(tokens, seen)
        normed: torch.Tensor = self.norm(tokens)
        return normed

    def forward(self, history: History, with_target: bool) -> torch.Tensor:
        """float32 [B, width]; 0 of no token."""
        events, present = history.events, history.present
        if with_target:
            events = torch.cat([events, history.target.unsqueeze(1)], dim=1)
            present = F.pad(present, (0, 1), value=True)
        if present.device.type == "cpu" and not torch.compiler.is_compiling():
            # What is before the longest history. On a CPU alone: looking at a GPU's would wait for it.
            start = present.shape[1] - max(1, int(present.sum(1).amax())) if len(present) else 0
            events, present = events[:, start:], present[:, start:]
        return self.states(events, present)[:, -1] * present[:, -1:]
