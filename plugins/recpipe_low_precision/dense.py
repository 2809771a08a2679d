"""Linear layers of a model: ranges from a calibration slice, the error of each type, and its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.answers.stored import replace_module
from recpipe.common.timing import median_seconds
from recpipe.plugin import UserError
from recpipe.private_api.int8 import EIGHT_BITS, SEVEN_BITS, int8_adds_up
from recpipe.private_api.int8 import LARGEST as LARGEST_WEIGHT_CODE
from recpipe_low_precision.layers import Layer, LowPrecisionLinear, bfloat16_has_units, is_linear
from recpipe_low_precision.lookups import LEAST_SECONDS
from recpipe_low_precision.row_types import FLOAT, Assignment, Choice
from recpipe_low_precision.slices import LAYER, Slice

TYPES = ("bfloat16", "int8")
BYTES = {FLOAT.kind: 4, "bfloat16": 2, "int8": 1}
"""Bytes of a weight."""
MEASURED = 256
"""The batch size at which layers are timed."""
PAYS = 1.1
"""A type is taken for a layer if it is so many times as fast as float32, where times decide."""
BINS = 4096
SHRINKS = np.geomspace(1.0, 1e-3, 73)
"""Shares of the whole range that are tried, for each side of it."""
ROW_SHRINKS = np.linspace(1.0, 0.4, 25)
"""Shares of the largest weight of an output that are tried as the end of its range."""


@dataclass(frozen=True)
class Linear:
    """A linear layer that can be computed in low precision."""

    path: str
    low: LowPrecisionLinear
    """The layer in the slice's model."""
    errors: dict[str, float]
    """For each type the error of its output, L2 relative, on the slice's first batch."""
    seconds: dict[str, float] = field(default_factory=dict)
    """For each type the time of ``MEASURED`` samples, if times decide."""

    def cost(self, choice: Choice) -> float:
        """Seconds, or bytes of its weights where times do not decide."""
        return self.seconds[choice.kind] if self.seconds else BYTES[choice.kind] * self.low.weight.numel()

    def fits(self, choice: Choice, bound: float) -> bool:
        """Whether its error is within ``bound``, and it is faster where times decide."""
        return self.errors[choice.kind] <= bound and not self.slower(choice)

    def slower(self, choice: Choice) -> bool:
        """Whether it is not faster than float32, where times decide."""
        return bool(self.seconds) and self.seconds[choice.kind] * PAYS > self.seconds[FLOAT.kind]


def types_for(dense: str) -> list[str]:
    """The types that the knob ``dense`` allows here; ``UserError`` for bfloat16 on a CPU without units."""
    if dense == "bfloat16" and not bfloat16_has_units():
        raise UserError(
            "plugins.low_precision.dense=bfloat16: this CPU has no bfloat16 units (avx512_bf16, amx_bf16), "
            "and would be slower than in float32: choose int8 or float32"
        )
    if dense == "auto":
        return [kind for kind in TYPES if kind == "int8" or bfloat16_has_units()]
    return [dense] if dense in TYPES else []


def largest_code(reduce_range: bool | None) -> int:
    """The largest code of a layer's input in int8; None: 7 bits where 8 are not exact on this CPU."""
    return SEVEN_BITS if (not int8_adds_up() if reduce_range is None else reduce_range) else EIGHT_BITS


def calibrate(slice_: Slice, tables: Assignment, kinds: Sequence[str], most: int) -> dict[str, Linear]:
    """Make the linear layers of the slice's model able to run in each of ``kinds``, with ranges of what they
    are given when tables are kept by ``tables``. By their names among an assignment's.

    ``most`` is the largest code of an int8 layer's input.
    """
    module = slice_.called.module
    linears = {path: m for path, m in module.named_modules() if is_linear(m)}
    seen = {path: Inputs() for path in linears}
    firsts: dict[str, torch.Tensor] = {}

    def widen(path: str, x: torch.Tensor) -> None:
        firsts.setdefault(path, x.detach().clone())
        seen[path].widen(x)

    slice_.assign(tables)
    watch_inputs(slice_, linears, widen)
    watch_inputs(slice_, linears, lambda path, x: seen[path].count(x))
    found = {}
    for path, first in firsts.items():
        linear = linears[path]
        assert isinstance(linear, nn.Linear)
        if not seen[path].finite or not bool(linear.weight.isfinite().all()):
            continue
        scale, zero = seen[path].coded(most)
        layers = {"bfloat16": Layer("bfloat16"), "int8": Layer("int8", scale, zero, most)}
        scales = weight_scales(linear.weight.detach())
        low = LowPrecisionLinear(linear, [layers[kind] for kind in kinds], scales)
        replace_module(module, path, low)
        errors = {}
        with torch.no_grad():
            low.kind = FLOAT.kind
            exact = low(first).double()
            for kind in kinds:
                low.kind = kind
                errors[kind] = float((low(first).double() - exact).norm() / exact.norm().clamp_min(1e-30))
        found[f"{LAYER}{path}"] = Linear(path, low, errors)
        slice_.layers[f"{LAYER}{path}"] = low
    slice_.assign(tables)
    return found


def watch_inputs(
    slice_: Slice, linears: Mapping[str, nn.Module], see: Callable[[str, torch.Tensor], None]
) -> None:
    """Run the slice, and let ``see`` have the inputs of each layer."""

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, given: see(path, given[0]) if given else None

    hooks = [module.register_forward_pre_hook(hook(path)) for path, module in linears.items()]
    try:
        slice_.evaluate_called(slice_.called)
    finally:
        for handle in hooks:
            handle.remove()


def measure(layers: Mapping[str, Linear], kinds: Sequence[str]) -> None:
    """Time each layer in each type, by one thread."""
    names = [FLOAT.kind, *kinds]
    for linear in layers.values():
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(MEASURED, linear.low.in_features, generator=draw)
        with torch.no_grad():
            runs = [partial(linear.low.runs(kind), x) for kind in names]
            times = median_seconds(runs, least=LEAST_SECONDS, threads=1)
        linear.seconds.update(zip(names, times, strict=True))


@dataclass
class Inputs:
    """What a layer is given: first its range, then its histogram. Zeros count apart, since they are exact."""

    low: float = 0.0
    high: float = 0.0
    finite: bool = True
    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS))

    def widen(self, x: torch.Tensor) -> None:
        """See values for their range."""
        if x.numel():
            low, high = (float(end) for end in x.aminmax())
            self.finite = self.finite and np.isfinite(low) and np.isfinite(high)
            self.low, self.high = min(self.low, low), max(self.high, high)

    def count(self, x: torch.Tensor) -> None:
        """See the same values for their histogram."""
        if self.finite and self.high > self.low:
            found = torch.histc(x[x != 0].float(), BINS, self.low, self.high)
            self.counts += found.double().numpy()

    def coded(self, most: int) -> tuple[float, int]:
        """Scale and code of 0, so that codes 0 to ``most`` make the smallest squared error."""
        width = (self.high - self.low) / BINS
        if not width > 0:
            return 1.0, 0
        centres = (self.low + width * (np.arange(BINS) + 0.5)).astype(np.float64)
        best = (np.inf, 1.0, 0)
        for low in self.low * SHRINKS if self.low < 0 else [0.0]:
            for high in self.high * SHRINKS if self.high > 0 else [0.0]:
                scale = (high - low) / most
                if not scale > 0:
                    continue
                zero = int(np.clip(np.rint(-low / scale), 0, most))
                # What is cut off, and a twelfth of a step's square for all others.
                least, largest = -zero * scale, (most - zero) * scale
                first, last = np.searchsorted(centres, (least, largest))
                below, above = centres[:first] - least, centres[last:] - largest
                cut = self.counts[:first] @ (below * below) + self.counts[last:] @ (above * above)
                error = float(cut + self.counts[first:last].sum() * scale * scale / 12)
                best = min(best, (error, scale, zero))
        return best[1], best[2]


def weight_scales(weight: torch.Tensor, largest: int = LARGEST_WEIGHT_CODE) -> torch.Tensor:
    """For each output the scale of its codes, ``-largest`` to ``largest``, that makes the smallest squared
    error: float32 [O] of ``weight`` float32 [O, I]."""
    whole = weight.abs().amax(1) / largest
    whole = torch.where(whole > 0, whole, torch.ones_like(whole))
    best, least = whole, torch.full_like(whole, torch.inf)
    for shrink in ROW_SHRINKS:
        scales = whole * float(shrink)
        codes = (weight / scales[:, None]).round_().clamp_(-largest, largest)
        error = (codes.mul_(scales[:, None]) - weight).square_().sum(1)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best
