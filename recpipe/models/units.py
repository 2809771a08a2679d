"""The units of HSTU: attention without a softmax, over the events of a history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recpipe.models.histories import History

GROWTH = 0.301
"""Of the logarithm of time from one bucket to the next, which is 1.35 times as long."""
HIDDEN = -1e30
"""The bias of a later token: the silu of a sum with it is 0, and so is the slope there."""


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
    if values.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return cast(torch.Tensor, Counted.apply(values, places))  # type: ignore[no-untyped-call]
    return F.embedding(places, values.unsqueeze(1)).squeeze(-1)


class Counted(torch.autograd.Function):
    """``values_at`` on a CPU, whose gradient is a weighted count of the places: an embedding's takes 40 times
    as long for rows of one value."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.count = len(values)
        ctx.save_for_backward(places)
        return values[places]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        return torch.bincount(places.flatten(), gradient.flatten(), minlength=ctx.count), None


@dataclass(frozen=True)
class Block:
    """Samples side by side, of each of which the latest ``length`` tokens are computed."""

    length: int
    present: torch.Tensor
    """Which tokens there are, bool [b, length]."""
    between: torch.Tensor | None
    """Buckets of the times between tokens, int64 [b, length, length]; None: nobody knows them."""


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

    def forward(self, tokens: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
        """float32 [T, width] of the tokens of all ``blocks``, sample after sample, and of others behind them.
        A token sees those of its sample that are present and no later."""
        width = tokens.shape[1]
        gated = F.silu(self.project(self.norm(tokens)))
        u, others = torch.split(gated, [width, 3 * width], dim=1)
        bias = self._bias_of_places(max(block.length for block in blocks))
        if len(blocks) == 1:
            found = self._found(others, blocks[0], bias)
        else:
            sizes = [block.present.numel() for block in blocks]
            sizes.append(len(tokens) - sum(sizes))
            *each, behind = torch.split(others, sizes)
            parts = [self._found(own, block, bias) for own, block in zip(each, blocks, strict=True)]
            found = torch.cat([*parts, torch.zeros_like(behind[:, :width])])
        normed = self.found_norm(found / self.tokens)
        joined: torch.Tensor = tokens + self.joined(normed * u)
        return joined

    def _bias_of_places(self, count: int) -> torch.Tensor:
        """Between each of so many tokens and those that it may see (the last dimension), ``HIDDEN`` for those
        after it, float32 [count, count]."""
        places = torch.arange(count, device=self.places.device)
        before = places.unsqueeze(1) - places
        return values_at(self.places, before.clamp(min=0)).masked_fill(before < 0, HIDDEN)

    def _found(self, own: torch.Tensor, block: Block, bias: torch.Tensor) -> torch.Tensor:
        """What the tokens of a block take in, float32 [b * n, width]; ``own``: V, Q and K of each, [b * n,
        3 * width]."""
        n, heads, dim = block.length, self.heads, self.dim
        v, q, k = own.view(-1, n, 3, heads, dim).unbind(2)
        v = v * block.present[:, :, None, None]
        v, q, k = (each.transpose(1, 2).reshape(-1, n, dim) for each in (v, q, k))
        common, bias = q @ k.transpose(1, 2), bias[:n, :n]
        if self.times is not None and block.between is not None:
            bias = (bias + values_at(self.times, block.between)).unsqueeze(1)
            common = common.view(-1, heads, n, n)
        found = F.silu(common + bias).view(-1, n, n) @ v
        return found.view(-1, heads, n, dim).transpose(1, 2).reshape(-1, heads * dim)


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

    def forward(self, history: History, with_target: bool, latest: bool = False) -> torch.Tensor:
        """The states of each token, float32 [B, N, width], 0 where none is; of the ``latest`` alone: [B,
        width].

        On a CPU a sample is computed beside those that are about as long, so that less than half of what is
        computed is of no token.
        """
        events, present, ages = history.events, history.present, history.ages
        if with_target:
            events = torch.cat([events, history.target.unsqueeze(1)], dim=1)
            present = F.pad(present, (0, 1), value=True)
            ages = None if ages is None else F.pad(ages, (0, 1))
        count = present.shape[1]
        if present.device.type != "cpu" or torch.compiler.is_compiling() or not len(present):
            # Looking at a GPU's lengths would wait for it.
            states = self._states(events.flatten(0, 1), [self._block(present, ages)])
            states = states.view(-1, count, states.shape[1])
            states = states[:, -1] if latest else states
        else:
            order = LikeLengths(present)
            own_ages = [None] * len(order.blocks) if ages is None else order.of_blocks(ages)
            pairs = zip(order.of_blocks(present), own_ages, strict=True)
            states = self._states(
                Moved.apply(events.flatten(0, 1), order.taken, order.places),  # type: ignore[no-untyped-call]
                [self._block(*each) for each in pairs],
            )
            places = order.places.view(-1, count)
            if latest:
                states = states.index_select(0, places[:, -1])
            else:
                states = Moved.apply(states, order.places, order.taken)  # type: ignore[no-untyped-call]
                states = states.view(-1, count, states.shape[1])
        normed: torch.Tensor = self.norm(states)
        return normed * (present[:, -1:] if latest else present.unsqueeze(2))

    def _block(self, present: torch.Tensor, ages: torch.Tensor | None) -> Block:
        between = None if ages is None else buckets_between(ages, self.buckets)
        return Block(present.shape[1], present, between)

    def _states(self, events: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
        """float32 [T, width] of ``events`` [T, E], before the last norm."""
        tokens: torch.Tensor = self.entered(self.enter(events))
        for unit in self.units:
            if self.recompute and torch.is_grad_enabled():
                tokens = checkpoint(unit, tokens, blocks, use_reentrant=False)
            else:
                tokens = unit(tokens, blocks)
        return tokens


class LikeLengths:
    """Where the B * N tokens of samples are computed: those of samples that are about as long in a block, one
    block after the other, T in all, of which some are of no sample.

    oneDNN makes a kernel for each shape that it meets, which takes longer than the products, and numbers of
    samples differ from batch to batch: those of a block, and all tokens, are ``rounded_up``.
    """

    def __init__(self, present: torch.Tensor) -> None:
        """``present``: which tokens there are, bool [B, N], the latest last."""
        size, count = present.shape
        self.blocks: list[torch.Tensor] = []
        """Of each block, which of the B * N tokens is where, int64 [b, n]; B * N: none of them."""
        for samples, power in of_like_length(present.sum(1)):
            latest = torch.arange(max(0, count - power), count)
            places = samples.unsqueeze(1) * count + latest
            more = rounded_up(len(samples)) - len(samples)
            self.blocks.append(F.pad(places, (0, 0, 0, more), value=size * count))
        taken = torch.cat([places.flatten() for places in self.blocks])
        more = 0 if len(self.blocks) == 1 else rounded_up(len(taken)) - len(taken)
        self.taken = F.pad(taken, (0, more), value=size * count)
        """The same of all blocks, int64 [T]."""
        places = torch.full((size * count + 1,), len(self.taken))
        places[self.taken] = torch.arange(len(self.taken))
        self.places = places[:-1]
        """Where each of the B * N tokens is, int64 [B * N]; T: nowhere."""

    def of_blocks(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``values`` [B, N] of the tokens of each block, [b, n]; 0 where none is."""
        flat = F.pad(values.flatten(), (0, 1))
        return [flat[places] for places in self.blocks]


class Moved(torch.autograd.Function):
    """The rows [R, E] that ``taken`` int64 [T] names, [T, E], 0 where it is R. Each row is taken once at
    most, and to where, ``places`` int64 [R] says, T: nowhere. So its gradient is taken back, with no sum."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, taken: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(taken, places)
        return F.pad(rows, (0, 0, 0, 1)).index_select(0, taken)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        taken, places = ctx.saved_tensors
        back: torch.Tensor = Moved.apply(gradient, places, taken)  # type: ignore[no-untyped-call]
        return back, None, None


def of_like_length(lengths: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """For each power of 2 the samples int64 [b] whose ``lengths`` int64 [B] end there, and that power."""
    powers = lengths.clamp(min=1).log2().ceil().exp2().to(torch.int64)
    for power in torch.unique(powers):
        yield (powers == power).nonzero().squeeze(1), int(power)


def rounded_up(count: int) -> int:
    """The next number with four leading bits alone."""
    return count + -count % (1 << max(0, count.bit_length() - 4))
