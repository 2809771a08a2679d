"""A numeric debugger: a model in low precision beside the float one, table by table and layer by layer.

Each part is judged by itself: a table by its rows, a layer by what it makes of the float model's inputs. So
the part that breaks is named, not those behind it (after the numeric debugger of Deng et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recpipe.answers.row_types import BITS, decode_rows, row_scales
from recpipe.answers.stored import FewRows
from recpipe.model.call import Called
from recpipe_low_precision.bags import LowPrecisionTables
from recpipe_low_precision.layers import LowPrecisionLinear
from recpipe_low_precision.row_types import FLOAT
from recpipe_low_precision.slices import Slice, Stub

LEAST_SNR = {"fp32": 100.0, "fp16": 50.0, "int8": 30.0, "int4": 12.0, "int2": 3.0}
"""Decibels below which a part is broken, by its type. Rows of normal weights have 74, 48, 24 and 10 in fp16,
int8, int4 and int2."""
LEAST_LAYER_SNR = {"fp32": 100.0, "bfloat16": 35.0, "int8": 20.0}
"""Decibels below which a linear layer's output is broken. Normal inputs and weights have 51 in bfloat16, 38
in int8, 33 in int8 with 7 bits."""
EXACT = 999.0
"""Decibels of a part without error."""


@dataclass(frozen=True)
class Compared:
    """A table or a layer of the low-precision model beside the float one."""

    name: str
    kind: str
    """The type of a table's rows, or of a layer's weights."""
    error: float
    """L2 norm of the error over that of the float values."""
    snr: float
    """Signal-to-noise ratio in decibels."""
    saturated: float | None = None
    """Share of a table's weights that its rows' scales and biases cannot reach, or of an int8 layer's inputs
    that its range cannot."""
    range_used: float | None = None
    """Share of codes between the smallest and the largest one in use; a table's is the mean over rows."""
    downstream: float | None = None
    """Relative error of a layer's output when the whole model runs in low precision."""
    layer: bool = False
    """Whether it is a layer."""

    @property
    def least(self) -> float:
        """The least signal-to-noise ratio that its type explains, in decibels."""
        return (LEAST_LAYER_SNR if self.layer else LEAST_SNR)[self.kind]

    @property
    def breaks(self) -> bool:
        """Whether its error is larger than its type explains."""
        return not self.snr >= self.least


def compare(slice_: Slice, low: Called) -> list[Compared]:
    """All tables and layers of ``low``, the worst first: by how far they are below what their type explains.

    ``slice_``: of the float checkpoint that ``low`` was made from; layers see its first batch.
    """
    parts = [*_tables(slice_, low.module), *_layers(slice_, low)]
    return sorted(parts, key=lambda part: part.snr - part.least)


def _tables(slice_: Slice, module: nn.Module) -> Iterator[Compared]:
    for name, place in slice_.source.places.items():
        table, bags = slice_.tables[name], module.get_submodule(place.collection)
        ids, values = torch.from_numpy(table.distinct), table.rows
        if not len(values):
            continue
        if isinstance(bags, FewRows):
            ids, bags = bags.numbers(table.config.feature_names[0], ids), bags.inner
        assert isinstance(bags, LowPrecisionTables)
        kind, places = bags.kind_of(place.own).kind, bags.places_of(place.own)
        if len(places):
            there = places[ids] >= 0
            values, ids = values[there], places[ids[there]].long()
        rows = bags.rows_of(place.own)[ids]
        error, snr = _apart(values, decode_rows(rows, kind, values.shape[1]))
        if kind not in BITS:
            yield Compared(name, kind, error, snr)
            continue
        scale, bias = (part[:, None] for part in row_scales(rows))
        most = 2 ** BITS[kind] - 1
        codes = (values - bias) / scale
        in_use = codes.round().clamp(0, most)
        used = ((in_use.amax(1) - in_use.amin(1)) / most).mean() if len(values) else torch.zeros(())
        yield Compared(name, kind, error, snr, _saturated(codes, most), float(used))


def _saturated(codes: torch.Tensor, most: int) -> float:
    """The share of values beyond the codes 0 to ``most``, which are not rounded yet."""
    # Half a step beyond the ends is rounding; the slack is for float32's own.
    return float(((codes < -0.5001) | (codes > most + 0.5001)).float().mean())


def _apart(values: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """Relative error and signal-to-noise ratio of ``found`` against ``values``."""
    signal, noise = float(values.double().norm()), float((found.double() - values.double()).norm())
    if math.isnan(noise) or math.isinf(noise):
        return math.inf, -EXACT
    if not noise:
        return 0.0, EXACT
    return (noise / signal, 20 * math.log10(signal / noise)) if signal else (math.inf, -EXACT)


def _layers(slice_: Slice, low: Called) -> Iterator[Compared]:
    batch = slice_.batches[0]
    slice_.assign(dict.fromkeys(slice_.tables, FLOAT))
    slice_.pieces.number = 0
    inputs, outputs = _seen(slice_.called, batch)
    _, low_outputs = _seen(low, batch)
    for name, given in inputs.items():
        if name not in low_outputs:
            continue
        module = low.module.get_submodule(name)
        with torch.no_grad():
            made = module(*given)
        kind = module.kind if isinstance(module, LowPrecisionLinear) else FLOAT.kind
        cut, used = None, None
        if isinstance(module, LowPrecisionLinear) and kind == "int8":
            own = module.layers["int8"]
            codes = given[0] / own.scale + own.zero
            in_use = codes.round().clamp(0, own.most)
            cut = _saturated(codes, own.most)
            used = float((in_use.max() - in_use.min()) / own.most)
        whole = _apart(outputs[name], low_outputs[name])[0]
        yield Compared(name, kind, *_apart(outputs[name], made), cut, used, whole, layer=True)


def _seen(called: Called, batch: Any) -> tuple[dict[str, tuple[Any, ...]], dict[str, torch.Tensor]]:
    """Inputs and outputs of each layer that has parameters, by its name, when the model sees ``batch``."""
    inputs: dict[str, tuple[Any, ...]] = {}
    outputs: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def seen(_: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            if isinstance(made, torch.Tensor) and name not in outputs:
                inputs[name], outputs[name] = given, made.detach().clone()

        return seen

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in called.module.named_modules()
        if not isinstance(module, Stub) and list(module.parameters(recurse=False))
    ]
    try:
        with torch.no_grad():
            called.judge(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, outputs
