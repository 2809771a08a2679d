"""What reduced precision buys on a trained model: the studies of "Deep Learning Inference in Facebook Data
Centers" (Park et al., 2018, https://arxiv.org/abs/1811.09886), on its weights and what reaches its layers.

Sums in 16 bits, with outliers split off, take 2 instructions in place of 3; here they are emulated. Ranges
are those of the smallest and the largest value, or those of the smallest squared error; a range is net-aware
if it leaves out what the operator behind throws away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recpipe_low_precision.dense import Inputs, watch_inputs, weight_scales
from recpipe_low_precision.layers import is_linear
from recpipe_low_precision.row_types import FLOAT
from recpipe_low_precision.slices import Slice, between_samples
from torch import nn

from recpipe.answers.stored import replace_module
from recpipe.answers.trained import open_trained
from recpipe.backend.chain import Chain, steps
from recpipe.common.device import one_thread
from recpipe.errors import UserError
from recpipe_deeprecsys.characterize.emulated import BLOCK, Coded, Emulated, Range, Sums, Sums16, exact, split

SAMPLES, BATCH = 2048, 256
"""Held-out samples that ranges are learnt from and models are judged by, and those of a batch."""
CACHE = 1 << 28
SPLITS = (7, 6, 5, 4)
"""Bits of the weights that are not outliers."""
BLOCKS = (64, 16)
"""Shorter blocks than FBGEMM's, with outliers beyond 7 bits split off."""
WIDTHS = (8, 4)
"""Bits of codes for ranges."""
Scales = Callable[[torch.Tensor, int], torch.Tensor]
"""The scales of weights float32 [O, I] in codes up to the largest one: float32 [O]."""


@dataclass(frozen=True)
class Layer:
    """A linear layer of the model, and what it is given."""

    path: str
    linear: nn.Linear
    relu: bool
    """Whether ReLU follows."""
    inputs: Inputs
    first: torch.Tensor
    """Its inputs in the first batch."""
    outputs: tuple[float, float]
    """The smallest and the largest value that comes out."""

    def coded(self, bits: int, scales: Scales, least: bool = False) -> Coded:
        """Weights with ``scales``, and inputs from the smallest to the largest, or with the ``least`` squared
        error."""
        most, largest = 2**bits - 1, 2 ** (bits - 1) - 1
        whole = Range.between(self.inputs.low, self.inputs.high, most)
        inputs = Range(*self.inputs.coded(most), most) if least else whole
        return Coded.of(self.linear, inputs, scales(self.linear.weight.detach(), largest), largest)


def studied(checkpoint: Path) -> list[dict[str, Any]]:
    """The rows of all studies, on a float32 checkpoint's held-out samples. ``UserError`` if it predicts no
    clicks, or has no linear layer."""
    trained = open_trained(checkpoint)
    held_out = between_samples(trained.dataset.batches("eval", BATCH), 0, SAMPLES)
    with one_thread():  # its operators are many and small, and their bits do not depend on the threads then
        study = Study(Slice(trained.source(), held_out, CACHE))
        return [*study.sums(), *study.ranges(), *study.net_aware()]


class Study:
    """A slice's model with its layers emulated. Each row: the error of the layers' results, each of what the
    float model gives it, and the model's NE."""

    def __init__(self, slice_: Slice) -> None:
        slice_.assign(dict.fromkeys(slice_.tables, FLOAT))
        self.slice, self.layers = slice_, layers_of(slice_)
        if not self.layers:
            raise UserError("the model has no linear layer: there is nothing to study")
        self.base = self._ne()

    def sums(self) -> Iterator[dict[str, Any]]:
        """Sums in 32 bits, in 16, and in 16 without outliers beyond several widths; a scale for all weights
        of a layer."""
        yield self._row("sums", "32 bits", None, self._summed(exact))
        tried: list[tuple[int | None, int]] = [(bits, BLOCK) for bits in (None, *SPLITS)]
        for bits, block in [*tried, *((SPLITS[0], block) for block in BLOCKS)]:
            sums = Sums16(bits, block)
            name = "16 bits" if bits is None else f"16 bits, split at {bits}"
            name = name if block == BLOCK else f"{name}, blocks of {block}"
            row = self._row("sums", name, bits, self._summed(sums))
            outliers = None if bits is None else self._outliers(bits)
            yield {**row, "saturated": sums.saturated / sums.sums, "outliers": outliers}

    def ranges(self) -> Iterator[dict[str, Any]]:
        """Ranges of weights, of a layer or of each output, and of inputs: by the largest, or from end to
        end, or those with the least squared error."""
        for bits in WIDTHS:
            for name, scales, least in (
                ("max of tensor; ends", of_tensor, False),
                ("max of output; ends", of_outputs, False),
                ("L2 of output; ends", weight_scales, False),
                ("L2 of output; L2", weight_scales, True),
            ):
                yield self._row("ranges", name, bits, partial(_ranged, bits=bits, scales=scales, least=least))

    def net_aware(self) -> Iterator[dict[str, Any]]:
        """Results that ReLU follows in few bits, negative ones among them or not."""
        for bits in WIDTHS:
            for name, aware in (("from end to end", False), ("from 0 on", True)):
                yield self._row("net-aware", name, bits, partial(_rounded, bits=bits, aware=aware))

    def _summed(self, sums: Sums) -> Callable[[Layer], nn.Linear]:
        return lambda layer: Emulated(layer.linear, layer.coded(8, of_tensor), sums)

    def _row(
        self, study: str, setting: str, bits: int | None, made: Callable[[Layer], nn.Linear]
    ) -> dict[str, Any]:
        others = [made(layer) for layer in self.layers]
        with torch.no_grad():
            errors = [_error(layer, other) for layer, other in zip(self.layers, others, strict=True)]
        module = self.slice.called.module
        for layer, other in zip(self.layers, others, strict=True):
            replace_module(module, layer.path, other)
        try:
            ne = self._ne()
        finally:
            for layer in self.layers:
                replace_module(module, layer.path, layer.linear)
        return {
            "study": study,
            "setting": setting,
            "bits": bits,
            "outliers": None,
            "saturated": None,
            "error": (sum(error**2 for error in errors) / len(errors)) ** 0.5,
            "ne": ne,
            "ne_loss": ne / self.base - 1,
        }

    def _ne(self) -> float:
        """The mean over labels of normalized entropy."""
        found = self.slice.evaluate_called(self.slice.called)
        return float((found.losses.mean(axis=0) / self.slice.base_entropy).mean())

    def _outliers(self, bits: int) -> float:
        """The share of all weights that are outliers."""
        codes = [layer.coded(8, of_tensor).codes for layer in self.layers]
        return sum(int((split(own, bits)[1] != 0).sum()) for own in codes) / sum(own.numel() for own in codes)


def of_tensor(weight: torch.Tensor, largest: int) -> torch.Tensor:
    """One scale for all, by the largest weight."""
    whole = float(weight.abs().max()) / largest or 1.0
    return torch.full((len(weight),), whole)


def of_outputs(weight: torch.Tensor, largest: int) -> torch.Tensor:
    """A scale for each output, by its largest weight."""
    whole = weight.abs().amax(1) / largest
    return torch.where(whole > 0, whole, torch.ones_like(whole))


def _ranged(layer: Layer, bits: int, scales: Scales, least: bool) -> Emulated:
    return Emulated(layer.linear, layer.coded(bits, scales, least))


def _rounded(layer: Layer, bits: int, aware: bool) -> Emulated:
    low, high = layer.outputs
    outputs = Range.between(0.0 if aware else low, high, 2**bits - 1) if layer.relu else None
    return Emulated(layer.linear, outputs=outputs)


def _error(layer: Layer, other: nn.Module) -> float:
    """L2 of what ``other`` gives beside the layer, relative, behind the ReLU if there is one."""
    wanted, found = layer.linear(layer.first).double(), other(layer.first).double()
    if layer.relu:
        wanted, found = wanted.relu(), found.relu()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def layers_of(slice_: Slice) -> list[Layer]:
    """The linear layers that the slice's samples reach, with finite inputs."""
    module = slice_.called.module
    linears = {path: m for path, m in module.named_modules() if is_linear(m)}
    with_relu = {
        id(layer.linear)
        for member in module.modules()
        for chain in steps(member)
        if isinstance(chain, Chain)
        for layer in chain
        if layer.relu
    }
    inputs = {path: Inputs() for path in linears}
    firsts: dict[str, torch.Tensor] = {}
    ends: dict[str, tuple[float, float]] = {}

    def widen(path: str, x: torch.Tensor) -> None:
        firsts.setdefault(path, x.detach().clone())
        inputs[path].widen(x)
        linear = linears[path]
        assert isinstance(linear, nn.Linear)
        low, high = (float(end) for end in nn.functional.linear(x, linear.weight, linear.bias).aminmax())
        before = ends.get(path, (low, high))
        ends[path] = min(low, before[0]), max(high, before[1])

    watch_inputs(slice_, linears, widen)
    watch_inputs(slice_, linears, lambda path, x: inputs[path].count(x))
    found = []
    for path, first in firsts.items():
        linear = linears[path]
        assert isinstance(linear, nn.Linear)
        if inputs[path].finite:
            found.append(Layer(path, linear, id(linear) in with_relu, inputs[path], first, ends[path]))
    return found
