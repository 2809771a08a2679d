"""Linear layers whose inputs and weights are rounded to few bits, with what processors do of it emulated.

The layer's arithmetic is exact but for what is studied: codes are whole numbers, and their products are added
up in as many bits as the processor has for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

BLOCK = 256
"""Inputs whose products are added up in 16 bits before the sum goes on in 32: FBGEMM's KCB of its 16-bit
kernels (include/fbgemm/PackingTraits-inl.h)."""
LOWEST, HIGHEST = -(2**15), 2**15 - 1
"""Of 16 bits."""
Sums = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Codes of inputs [B, I] and of weights [O, I], both float64 and whole, to the sums of their products
[B, O]."""


@dataclass(frozen=True)
class Range:
    """How values become codes 0 to ``most``: value = scale * (code - zero)."""

    scale: float
    zero: int
    most: int

    @classmethod
    def between(cls, low: float, high: float, most: int) -> Range:
        """From the smallest value to the largest; 0 has a code."""
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / most if high > low else 1.0
        return cls(scale, max(0, min(most, round(-low / scale))), most)

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """Whole numbers, float64."""
        return (values.double() / self.scale).round().add(self.zero).clamp(0, self.most)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """The values that their codes stand for, float32."""
        return ((self.codes(values) - self.zero) * self.scale).float()


def exact(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sums in 32 bits, which no layer of a recommender exceeds."""
    return inputs @ weights.T


class Sums16:
    """Adds products up in 16 bits that saturate, as vpmaddubsw does with a pair of products and vpaddsw with
    the sums; after each ``block`` inputs, an even number, the sum goes on in 32 bits.

    ``bits``: weights that need more are outliers, which are added up in 32 bits (a sparse matrix); None: none
    are split off. ``saturated``: how many sums so far were not exact, of all ``sums``.
    """

    def __init__(self, bits: int | None = None, block: int = BLOCK) -> None:
        self.bits, self.block = bits, block
        self.saturated = self.sums = 0

    def __call__(self, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        main, outliers = (weights, None) if self.bits is None else split(weights, self.bits)
        found = torch.zeros(len(inputs), len(weights), dtype=torch.float64)
        # Sums of 16 bits, and products of a pair, are exact in float32.
        small, own = inputs.float(), main.float()
        for low in range(0, inputs.shape[1], self.block):
            part, weight = (each[:, low : low + self.block] for each in (small, own))
            if part.shape[1] % 2:
                part, weight = (nn.functional.pad(each, (0, 1)) for each in (part, weight))
            pairs = torch.bmm(_in_pairs(part), _in_pairs(weight).mT).clamp_(LOWEST, HIGHEST)
            block = pairs[0].clone()
            for pair in pairs[1:]:
                block.add_(pair).clamp_(LOWEST, HIGHEST)
            found += block
        self.saturated += int((found != exact(inputs, main)).sum())
        self.sums += found.numel()
        return found if outliers is None else found + exact(inputs, outliers)


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """[N, 2 P] as [P, N, 2]."""
    return codes.reshape(len(codes), -1, 2).transpose(0, 1)


def split(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of weights as the sum of what ``bits`` bits can say, and of the rest, which most codes do not
    have: W = W_main + W_outlier."""
    main = codes.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return main, codes - main


@dataclass(frozen=True)
class Coded:
    """A layer's weights in codes, and the range of its inputs."""

    inputs: Range
    codes: torch.Tensor
    """float64 [O, I], whole."""
    scales: torch.Tensor
    """float64 [O]."""

    @classmethod
    def of(cls, linear: nn.Linear, inputs: Range, scales: torch.Tensor, largest: int) -> Coded:
        """The weights of ``linear`` in codes ``-largest`` to ``largest``, with ``scales`` float32 [O]."""
        weight, own = linear.weight.detach().double(), scales.double()
        return cls(inputs, (weight / own[:, None]).round().clamp(-largest, largest), own)


class Emulated(nn.Linear):
    """Takes the place of ``linear``, whose parameters it shares: float32 [..., I] to [..., O].

    ``coded``: its weights and inputs in codes, whose products ``sums`` adds up; None: both stay as they are.
    ``outputs``: the range that what comes out is rounded in; None: it stays as it is.
    """

    def __init__(
        self, linear: nn.Linear, coded: Coded | None = None, sums: Sums = exact, outputs: Range | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.coded, self.sums, self.outputs = coded, sums, outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer of x."""
        found = super().forward(x) if self.coded is None else self._of_codes(x, self.coded)
        return found if self.outputs is None else self.outputs.rounded(found)

    def _of_codes(self, x: torch.Tensor, coded: Coded) -> torch.Tensor:
        own = coded.inputs
        codes = own.codes(x).view(-1, self.in_features)
        sums = self.sums(codes, coded.codes) - own.zero * coded.codes.sum(1)
        found = (sums * coded.scales * own.scale).float().view(*x.shape[:-1], -1)
        return found if self.bias is None else found + self.bias
