"""The units of HSTU: attention without a softmax, over the events of a history."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recpipe.models.histories import History, up_to_each

GROWTH = 0.301
"""Of the logarithm of time from one bucket to the next, which is 1.35 times as long."""


def buckets_between(ages: torch.Tensor, count: int) -> torch.Tensor:
    """The bucket, int64 [B, N, N], of the time from each token (the last dimension) to when what follows a
    token is asked for: the time of the next one, and the sample's after the last. floor(ln(seconds) / 0.301),
    0 below a second, at most ``count`` - 1.

    ``ages``: seconds before the sample, float32 [B, N].
    """
    following = F.pad(ages[:, 1:], (0, 1))
    seconds = ages.unsqueeze(1) - following.unsqueeze(2)
    return (seconds.clamp(min=1).log() / GROWTH).long().clamp(max=count - 1)


def as_they_are(linear: nn.Linear, times: float = 1.0) -> nn.Linear:
    """``linear``, which at first gives ``times`` its inputs, or as many of these as it has outputs."""
    nn.init.eye_(linear.weight).data.mul_(times)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def values_at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``values`` [N] at ``places``, in their shape. An embedding's gradient is added up in one
    order; that of an index in any, on several cores."""
    return F.embedding(places, values.unsqueeze(1)).squeeze(-1)


class Unit(nn.Module):
    """One unit over N tokens: silu(Q K^T + bias) V / N without a softmax, normalized, times a gate U, through
    a linear layer and added to the tokens. The bias is that of the places between two tokens, and of the
    bucket of the time between them if there are ``buckets``."""

    def __init__(self, tokens: int, width: int, heads: int, buckets: int = 0) -> None:
        super().__init__()
        self.tokens, self.heads, self.dim = tokens, heads, width // heads
        self.norm, self.found_norm = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.project, self.joined = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.places = nn.Parameter(0.02 * torch.randn(tokens))
        self.times = nn.Parameter(0.02 * torch.randn(buckets)) if buckets else None

    def forward(
        self, tokens: torch.Tensor, seen: torch.Tensor, between: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 [B, n, width] of the latest n <= N tokens, of which each sees those that are ``seen``, bool
        [B, n, n]; ``between``: buckets of times, int64 [B, n, n]."""
        u, v, q, k = F.silu(self.project(self.norm(tokens))).chunk(4, dim=2)
        apart = (*tokens.shape[:2], self.heads, self.dim)
        q, k, v = (each.reshape(apart).transpose(1, 2) for each in (q, k, v))
        places = torch.arange(tokens.shape[1], device=tokens.device)
        bias = values_at(self.places, (places.unsqueeze(1) - places).clamp(min=0))
        if self.times is not None and between is not None:
            bias = (bias + values_at(self.times, between)).unsqueeze(1)
        weights = F.silu(q @ k.transpose(2, 3) + bias) / self.tokens * seen.unsqueeze(1)
        found = self.found_norm((weights @ v).transpose(1, 2).flatten(2))
        joined: torch.Tensor = tokens + self.joined(found * u)
        return joined


class Transducer(nn.Module):
    """Units over a history's events and, if asked for, the target after them."""

    def __init__(
        self,
        tokens: int,
        event: int,
        width: int,
        heads: int,
        units: int,
        buckets: int,
        recompute: bool,
        normed: bool = False,
    ) -> None:
        """``buckets``: of times between events, 0: these are not known; ``recompute``: whether the backward
        pass computes units again, of which inputs alone are kept; ``normed``: whether tokens enter units
        normalized, as in the authors' ranker, so that small rows count as much as what units add to them."""
        super().__init__()
        self.buckets, self.recompute = buckets, recompute
        # With a bias: norms would else make as much of rows that are hardly trained as of others. Rows enter
        # as they are at first, times the root of their width as in the authors' code: they are small, and a
        # bias and what units add would drown them.
        self.enter = as_they_are(nn.Linear(event, width), event**0.5)
        self.entered: nn.Module = nn.LayerNorm(width) if normed else nn.Identity()
        self.units = nn.ModuleList(Unit(tokens, width, heads, buckets) for _ in range(units))
        self.norm = nn.LayerNorm(width)

    def states(
        self, events: torch.Tensor, present: torch.Tensor, ages: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of each token, float32 [B, N, width]; ``events``: [B, N, E], ``present``: bool [B, N], ``ages``:
        float32 [B, N]."""
        tokens, seen = self.entered(self.enter(events)), up_to_each(present)
        between = None if ages is None else buckets_between(ages, self.buckets)
        for unit in self.units:
            if self.recompute and torch.is_grad_enabled():
                tokens = checkpoint(unit, tokens, seen, between, use_reentrant=False)
            else:
                tokens = unit(tokens, seen, between)
        normed: torch.Tensor = self.norm(tokens)
        return normed

    def forward(self, history: History, with_target: bool) -> torch.Tensor:
        """The states of each token, float32 [B, N, width]; 0 where none is. On a CPU a sample is computed
        beside those that are about as long, so that less than half of what is computed is of no token."""
        events, present, ages = history.events, history.present, history.ages
        if with_target:
            events = torch.cat([events, history.target.unsqueeze(1)], dim=1)
            present = F.pad(present, (0, 1), value=True)
            ages = None if ages is None else F.pad(ages, (0, 1))
        if present.device.type != "cpu" or torch.compiler.is_compiling() or not len(present):
            # Looking at a GPU's lengths would wait for it.
            return self.states(events, present, ages) * present.unsqueeze(2)
        count, places, found = present.shape[1], [], []
        for own, power in of_like_length(present.sum(1)):
            start, rows = max(0, count - power), rounded_up(own)
            block = self.states(
                events.index_select(0, rows)[:, start:],
                present.index_select(0, rows)[:, start:],
                None if ages is None else ages.index_select(0, rows)[:, start:],
            )
            found.append(F.pad(block[: len(own)], (0, 0, start, 0)))
            places.append(own)
        states = torch.cat(found).index_select(0, torch.cat(places).argsort())
        return states * present.unsqueeze(2)


def of_like_length(lengths: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """For each power of 2 the samples int64 [b] whose ``lengths`` int64 [B] end there, and that power."""
    powers = lengths.clamp(min=1).log2().ceil().exp2().to(torch.int64)
    for power in torch.unique(powers):
        yield (powers == power).nonzero().squeeze(1), int(power)


def rounded_up(samples: torch.Tensor) -> torch.Tensor:
    """``samples`` int64 [b], with the first one again until their number has four leading bits alone.

    oneDNN makes a kernel for each shape that it meets, which takes longer than the products, and numbers of
    samples differ from batch to batch.
    """
    step = 1 << max(0, len(samples).bit_length() - 4)
    return torch.cat([samples, samples[:1].expand(-len(samples) % step)])
