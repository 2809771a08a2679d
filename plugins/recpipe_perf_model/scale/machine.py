"""A machine of hosts with GPUs, on paper: its constants, each with its source, from a yaml file.

A constant is ``name: [value, source]``; the source is one of the file's ``sources``, or ``assumed``. Files
for public machines lie in ``machines/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from recpipe.errors import UserError, did_you_mean, shown
from recpipe_perf_model.scale.reading import Reader

MACHINES = Path(__file__).parent / "machines"
ASSUMED = "assumed"
GIGA, MICRO = 1e9, 1e-6


@dataclass(frozen=True)
class Curve:
    """The seconds of a message by its bytes, in three segments: constant for small ones, between measured
    points in log space, and by a rate above the last."""

    points: tuple[tuple[float, float], ...]
    """Bytes and seconds, ascending."""
    rate: float
    """Bytes a second above the last point."""

    def seconds(self, count: float) -> float:
        """The time of ``count`` bytes; none for none."""
        if count <= 0:
            return 0.0
        first, last = self.points[0], self.points[-1]
        if count <= first[0]:
            return first[1]
        if count >= last[0]:
            return last[1] + (count - last[0]) / self.rate
        sizes, seconds = zip(*self.points, strict=True)
        return exp(np.interp(log(count), [log(size) for size in sizes], [log(s) for s in seconds]))


@dataclass(frozen=True)
class Products:
    """The share of a GPU's peak that matrix products of m x n results over k reach, by m * n and k."""

    outputs: tuple[float, ...]
    depths: tuple[float, ...]
    shares: tuple[tuple[float, ...], ...]
    """A row for each of ``outputs``."""

    def share(self, outputs: float, depth: float) -> float:
        """Between the table's points in log space; beyond them what the nearest has."""
        at = np.interp(log(max(1.0, outputs)), [log(o) for o in self.outputs], range(len(self.outputs)))
        low = min(int(at), len(self.outputs) - 2)
        along = [log(d) for d in self.depths]
        two = [np.interp(log(max(1.0, depth)), along, [log(s) for s in self.shares[low + k]]) for k in (0, 1)]
        return exp(two[0] + (at - low) * (two[1] - two[0]))


@dataclass(frozen=True)
class Constants:
    """A machine's constants. Rates are of one GPU and in one direction where nothing else is said."""

    gpus_per_host: float
    hbm_gb: float
    hbm_gb_s: float
    hbm_share: float
    """Of ``hbm_gb_s``, what a kernel that is bound by memory reaches."""
    tflops_fp32: float
    tflops_tf32: float
    tflops_half: float
    """fp16 or bf16, without sparsity."""
    link_gb_s: float
    """Between the GPUs of a host."""
    link_us: float
    """Of a small message between them."""
    nic_gb_s: float
    """Between hosts, for each GPU."""
    nic_share: float
    nic_us: float
    pcie_gb_s: float
    pcie_share: float
    dram_gb: float
    """Of a host, as are the constants below."""
    dram_gb_s: float
    ssd_gb: float
    ssd_reads_s: float
    """Random reads of 4 KiB a second."""
    kernel_us: float
    """Of a GPU's kernel with next to no work."""
    operator_us: float
    """Of the host, to begin an operator of an eager step."""
    reserved_share: float
    """Of GPU memory that is kept free."""


@dataclass(frozen=True)
class Machine:
    """A kind of host, and as many of them as are wanted."""

    name: str
    title: str
    constants: Constants
    sources: Mapping[str, str]
    """The source of each constant, curve and table, in full."""
    curves: Mapping[str, Curve]
    """``alltoall`` within a host, by the bytes that a GPU sends to others; ``allreduce`` within a host, by
    the bytes of its buffer; ``network``, by the bytes that a GPU sends to other hosts."""
    products: Products

    def changed(self, changes: Mapping[str, float]) -> Machine:
        """The same machine with other constants; curves that were measured change in proportion."""
        known = [field.name for field in fields(Constants)]
        for name, value in changes.items():
            if name not in known:
                raise UserError(f"scale.change.{shown(name)}: no such constant.{did_you_mean(name, known)}")
            if not value > 0:
                raise UserError(f"scale.change.{name}={value}: must be above 0")
        was, now = self.constants, replace(self.constants, **changes)
        link = now.link_gb_s / was.link_gb_s, now.link_us / was.link_us
        nic = now.nic_gb_s * now.nic_share / (was.nic_gb_s * was.nic_share), now.nic_us / was.nic_us
        curves = {}
        for name, curve in self.curves.items():
            # What a point's bytes take becomes shorter, and the least time longer.
            faster, slower = nic if name == "network" else link
            least = curve.points[0][1]
            points = tuple((size, least * slower + (took - least) / faster) for size, took in curve.points)
            curves[name] = Curve(points, curve.rate * faster)
        noted = {**self.sources, **dict.fromkeys(changes, "changed by scale.change")}
        return replace(self, constants=now, curves=curves, sources=noted)


def machine(name: str) -> Machine:
    """A machine that is shipped, by its name, or one from a yaml file of the same form; ``UserError`` in one
    line names the file and the key."""
    reader = Reader.named("scale.machine", name, MACHINES, ("products",))
    reader.only({"title", "sources", "constants", "curves", "products"})
    cited = reader.part("sources").values
    given, known = reader.part("constants"), [field.name for field in fields(Constants)]
    given.only(set(known))
    values, sources = {}, {}
    for key in known:
        values[key], source = given.cited(key)
        sources[key] = in_full(cited, source, given, key)
    constants = Constants(**values)
    link, nic = constants.link_gb_s * GIGA, constants.nic_gb_s * constants.nic_share * GIGA
    curves = {
        "alltoall": Curve(((1.0, constants.link_us * MICRO),), link),
        "allreduce": Curve(((1.0, constants.link_us * MICRO),), link / 2),  # a ring moves the buffer twice
        "network": Curve(((1.0, constants.nic_us * MICRO),), nic),
    }
    measured = reader.part("curves", {})
    measured.only(set(curves))
    for key in measured.values:
        curve = measured.part(key)
        curve.only({"points", "source"})
        points = curve.pairs("points")
        if len(points) < 2 or any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(points)):
            raise curve.wrong("points", "must be two or more [bytes, microseconds] that ascend")
        seconds = tuple((size, micro * MICRO) for size, micro in points)
        (before, early), (last, late) = seconds[-2:]
        rate = nic if key == "network" else (last - before) / max(late - early, 1e-12)
        curves[key] = Curve(seconds, rate)
        sources[f"curve of {key}"] = in_full(cited, curve.text("source"), measured, key)
    table = reader.text("products")
    sources["matrix products"] = in_full(cited, f"products_{table}", reader, "products")
    shares = Reader.named("products", "products", MACHINES).part(table)
    products = Products(
        tuple(2.0**power for power in shares.numbers("outputs_log2")),
        tuple(shares.numbers("depths")),
        tuple(tuple(map(float, row)) for row in shares.values["shares"]),
    )
    title = reader.text("title")
    return Machine(Path(reader.where).stem, title, constants, sources, curves, products)


def in_full(cited: Mapping[str, Any], source: str, part: Reader, key: str) -> str:
    """What ``source`` stands for in a file that has these sources ``cited``; ``key`` has it."""
    if source != ASSUMED and source not in cited:
        raise part.wrong(key, f"has the source '{shown(source)}', which is not among the file's sources")
    return source if source == ASSUMED else str(cited[source])
