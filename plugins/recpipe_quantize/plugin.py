"""Built-in quantization as a plugin: codecs of cold rows, storage types, precisions between ranks."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.kit import Bf16Rows, Fp16Rows, Int8Rows, wire_codecs
from recpipe.plugin import (
    Context,
    Contribution,
    Direction,
    Figure,
    Invariant,
    Link,
    Plugin,
    PluginError,
    Quantizer,
    RecordLayout,
    RowCodec,
    TableInfo,
)

if TYPE_CHECKING:
    from recpipe_perf_model import Facts, Statement


B = TypeVar("B")
EVERY = 8
"""One in so many calls of ``encode`` is sampled."""
ROWS = 32
"""The most rows that are sampled in a call."""


class Meter:
    """The largest and the mean rounding error of weights that training writes back; first values are not
    counted."""

    def __init__(self) -> None:
        self.rows = self.values = self.calls = 0
        self.rounded_any = False
        """Whether any row was rounded, first values included."""
        self.largest = self.sum = self.sum_of_sizes = 0.0
        self._counts = False
        self._lock = threading.Lock()

    def begun(self, batches: Iterator[B]) -> Iterator[B]:
        """Pass ``batches`` on unchanged; when they are asked for, training begins."""
        self._counts = True
        yield from batches

    def wants(self) -> bool:
        """Whether to sample this call."""
        with self._lock:
            self.calls += self._counts
            return self._counts and self.calls % EVERY == 1

    def add(self, weights: NDArray[np.float32], kept: NDArray[np.float32]) -> None:
        """Add weights of some rows, float32 [n, dim], and what the codec keeps of them."""
        errors = np.abs(kept.astype(np.float64) - weights)
        with self._lock:
            self.rows += len(weights)
            self.values += errors.size
            self.largest = max(self.largest, float(errors.max(initial=0)))
            self.sum += float(errors.sum())
            self.sum_of_sizes += float(np.abs(weights).sum())

    def figures(self) -> dict[str, Figure]:
        """The figures for the report."""
        values = max(1, self.values)
        return {
            "sampled_rows": self.rows,
            "rounding_error_largest": self.largest,
            "rounding_error_mean": self.sum / values,
            "sampled_weight_mean": self.sum_of_sizes / values,
        }


class Metered(RowCodec):
    """A wrapper of ``codec`` whose rounding errors ``meter`` samples."""

    def __init__(self, codec: RowCodec, layout: RecordLayout, meter: Meter) -> None:
        self.codec, self.layout, self.meter = codec, layout, meter
        self.bytes_per_record = codec.bytes_per_record

    def encode(self, records: NDArray[np.float32]) -> NDArray[np.uint8]:
        """What ``codec`` encodes, sampled for the report."""
        encoded = self.codec.encode(records)
        self.meter.rounded_any |= len(records) > 0
        if len(records) and self.meter.wants():
            chosen = slice(None, None, -(-len(records) // ROWS))
            kept = np.empty((len(encoded[chosen]), self.layout.width), np.float32)
            self.codec.decode(np.ascontiguousarray(encoded[chosen]), kept)
            self.meter.add(records[chosen, : self.layout.dim], kept[:, : self.layout.dim])
        return encoded

    def decode(self, encoded: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """What ``codec`` decodes."""
        self.codec.decode(encoded, out)

    def rounded(self, records: torch.Tensor) -> torch.Tensor | None:
        """What ``codec`` rounds to; not sampled, since nothing is written back."""
        self.meter.rounded_any |= len(records) > 0
        return self.codec.rounded(records)


COLD: Mapping[str, Callable[[RecordLayout], RowCodec]] = {
    "int8": Int8Rows,
    "fp16": Fp16Rows,
    "bf16": Bf16Rows,
}
STORED = {"fp32": 4, "fp16": 2}
"""The types of tables in device memory, and bytes of a weight. FBGEMM trains no others."""
WIRE = ("fp32", "fp16", "bf16")
"""The types of rows sent between ranks. int8 between ranks is offered by ``neo``, whose planner
keeps rows whole."""


class Quantize(Plugin):
    """Rows in fewer bits: cold, stored or sent; optimizer state stays exact."""

    api = (2, 4)

    def __init__(self, *, cold: str, storage: str, forward: str, backward: str, tables: str) -> None:
        _one_of("cold", cold, ("fp32", *COLD))
        _one_of("storage", storage, tuple(STORED))
        _one_of("forward", forward, WIRE)
        _one_of("backward", backward, WIRE)
        self.cold, self.storage, self.tables = cold, storage, tables
        self.wire = (forward, backward)
        altered = set()
        if {cold, storage, *self.wire} != {"fp32"}:
            altered.add(Invariant.EXACT_GRADIENT)
        if storage != "fp32":
            altered.add(Invariant.TABLE_LAYOUT)
        self.alters = frozenset(altered)

    def contribute(self, ctx: Context) -> Contribution:
        """The quantizer and its figures; an empty contribution if all is float32."""
        if not self.alters:
            return Contribution()
        made = FewerBits(self, [table.pooled for table in ctx.tables.values()])
        return Contribution(
            stream=[Link(made.meter.begun)] if self.cold != "fp32" else (),
            quantizer=made,
            report=[
                lambda run: figures(self, made, ctx.tables) | {"altered": self._altered(made, ctx.trainers)}
            ],
        )

    def _altered(self, made: FewerBits, trainers: int) -> str:
        """Which of the invariants this run altered: none if no row was stored, sent or made cold in fewer
        bits."""
        sent = trainers > 1 and self.wire != ("fp32", "fp32")
        used = self.storage != "fp32" or sent or made.meter.rounded_any
        return ", ".join(sorted(i.name for i in self.alters)) if used else "nothing"

    def costs(self, facts: Facts) -> Statement:
        """State what the performance model needs for a prediction without a run."""
        from recpipe_quantize.costs import statement

        return statement(facts, self.cold, COLD)


class FewerBits(Quantizer):
    """The quantizer that the knobs describe; ``pooled``: for each table, whether its rows are summed by
    bag."""

    def __init__(self, knobs: Quantize, pooled: list[bool]) -> None:
        self.knobs, self.pooled, self.tables = knobs, pooled, knobs.tables
        self.meter = Meter()

    def cold(self, layout: RecordLayout) -> RowCodec | None:
        """The built-in codec, with its errors metered."""
        if self.knobs.cold == "fp32":
            return None
        return Metered(COLD[self.knobs.cold](layout), layout, self.meter)

    def storage(self, table: TableInfo) -> str | None:
        """One type for all tables."""
        return None if self.knobs.storage == "fp32" else self.knobs.storage

    def codecs(self) -> Mapping[tuple[Any, Direction], Any]:
        """TorchRec's codecs."""
        return wire_codecs(*self.knobs.wire, self.pooled)


def figures(knobs: Quantize, made: FewerBits, tables: Mapping[str, TableInfo]) -> dict[str, Figure]:
    """Bytes of the quantized tables before and after, and the effect of rounding on this rank."""
    chosen = [table for name, table in tables.items() if fnmatchcase(name, knobs.tables)]
    rows = sum(table.rows for table in chosen)
    before = sum(table.rows * 4 * (table.dim + table.state) for table in chosen)
    found: dict[str, Figure] = {"float32_record_bytes": before / rows}
    if knobs.cold != "fp32":
        layouts = {RecordLayout(table.dim, table.dim + table.state) for table in chosen}
        sizes = {layout: COLD[knobs.cold](layout).bytes_per_record for layout in layouts}
        after = sum(t.rows * sizes[RecordLayout(t.dim, t.dim + t.state)] for t in chosen)
        found |= {
            "record_bytes": after / rows,
            "float32_cold_bytes": before,
            "cold_bytes": after,
            "saved_share": 1 - after / before,
            **made.meter.figures(),
        }
    if knobs.storage != "fp32":
        weight = STORED[knobs.storage]
        found["float32_stored_bytes"] = before
        found["stored_bytes"] = sum(t.rows * (weight * t.dim + 4 * t.state) for t in chosen)
    return found


def _one_of(knob: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
        raise PluginError(f"plugins.quantize.{knob}={value} is unknown; {hint}")
