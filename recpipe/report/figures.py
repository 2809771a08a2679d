"""Formats numbers for terminal and HTML: 1.25 MiB, 12,345, 0.7701."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recpipe.common.machine import BUSY_OTHERS
from recpipe.model.metrics import LOSS, Metric, named, ordered

_PREFIXES = ("p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E")
"""Decimal ones, of 1e-12 to 1e18."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
VERDICT = "verdict"
"""The figure of a plugin that says in a sentence whether it paid in this run, and why."""
ALTERED = "altered"
"""The figure of a plugin that says which of the invariants that it declares to alter it altered in this run:
their names with commas between, or ``nothing``."""
CLICKS = ("auc", "logloss", "ne")
BY_LABEL = "quality_by_label"
"""The key of those of each of several labels."""
FIRST = ("auc", "rmse", "poisson_deviance", "gauc")
"""The main figures for each kind of prediction."""
Figures = Mapping[str, float | None]


def count(value: float | None) -> str:
    """Whole number with thousands separators; ``-`` for None."""
    return "-" if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Three digits and a decimal prefix, 2.43M, for a narrow column; ``-`` for None."""
    if value is None:
        return "-"
    value = float(f"{value:.3g}")
    power = 0 if value == 0 else max(-4, min(len(_PREFIXES) - 5, math.floor(math.log10(abs(value)) / 3)))
    return f"{value / 1000.0**power:g}{_PREFIXES[power + 4]}"


def size(value: float | None) -> str:
    """Bytes in the binary unit that needs at most three digits; ``-`` for None."""
    if value is None:
        return "-"
    scale, unit = byte_unit(abs(value))
    return f"{value / scale:.3g} {unit}"


def byte_unit(largest: float) -> tuple[float, str]:
    """The binary unit in which ``largest`` bytes need at most three digits: its bytes and its name."""
    power = 0
    while largest >= 1000 and power < len(_UNITS) - 1:
        largest, power = largest / 1024, power + 1
    return 1024.0**power, _UNITS[power]


def time_unit(largest: float) -> tuple[float, str]:
    """The unit for times of up to ``largest`` seconds: its seconds and its name."""
    if largest < 300:
        return 1.0, "s"
    return (60.0, "min") if largest < 3 * 3600 else (3600.0, "h")


def shortened(text: str, most: int = 28) -> str:
    """``text``, without its middle if it has more than ``most`` characters."""
    head = most * 2 // 3
    return text if len(text) <= most else f"{text[: head - 1]}…{text[head - most :]}"


def decimal(value: float | None, digits: int = 4) -> str:
    """Fixed number of decimals; ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 5) -> str:
    """Like ``decimal`` with its sign, for differences."""
    return "-" if value is None else f"{value:+.{digits}f}"


def interval(value: Sequence[float] | None, digits: int) -> str:
    """``0.95-1.04``; ``-`` for None."""
    return "-" if value is None else "-".join(f"{end:.{digits}f}" for end in value)


def scientific(value: float | None) -> str:
    """Two digits and an exponent, for parameters' differences; ``-`` for None."""
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def figure(name: str, value: object) -> str:
    """A plugin's figure, formatted by its name: with ``bytes`` in it, or ``_share`` or ``_seconds`` at its
    end."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if "bytes" in name.split("_"):
        return size(value)
    if name.endswith("share"):
        return f"{100 * value:.1f}%"
    if name.endswith("seconds"):
        return f"{value:.3g} s"
    return count(value) if isinstance(value, int) else f"{value:.4g}"


def label(name: str) -> str:
    """``cold_rows_fetched`` as ``cold rows fetched``."""
    return name.replace("_", " ")


def emulated(emulation: Mapping[str, float | None]) -> str:
    """``tiers.emulate`` in words: 100 us a message, 10 Gbit/s."""
    speed = emulation["gbit_per_s"]
    return f"{emulation['latency_us']:g} us a message" + (f", {speed:g} Gbit/s" if speed else "")


def disturbed(share: float | None, what: str) -> str:
    """A warning where other programs took more than a tenth of the machine during ``what``; else ''."""
    if share is None or share <= BUSY_OTHERS:
        return ""
    return f"other programs took {100 * share:.0f}% of this machine's processors during {what}"


def title(name: str) -> str:
    """How tables call a figure of quality."""
    metric = named(name)
    return name if metric is None else metric.label + name[len(metric.name) :]


def verdict(name: str, value: float, other: float, apart: Sequence[float] | None) -> str | None:
    """``better`` or ``worse``: how the figure ``value`` is beside ``other``, where the interval of their
    difference, ``apart``, leaves out 0; None where it does not."""
    if apart is None or apart[0] <= 0 <= apart[1]:
        return None
    metric = named(name)
    way = "lower" if metric is None else metric.better  # of a loss
    if way == "near 1":
        return "better" if abs(value - 1) < abs(other - 1) else "worse"
    return "better" if (value > other) == (way == "higher") else "worse"


def quality_names(several: Iterable[Iterable[str]]) -> list[str]:
    """Those of ``several`` runs' names that are of figures of quality, each once, in the order of tables."""
    found = {name for names in several for name in names}
    metrics = ordered(found)
    clicks = [name for name in CLICKS if name in metrics]
    return [*clicks, *([LOSS] if LOSS in found else []), *metrics[len(clicks) :]]


def shown_figures(several: Iterable[Figures]) -> list[str]:
    """The names of the main figures of ``several`` runs: without the loss of a run with a logloss, and AUC,
    logloss and NE if no run has any."""
    found: set[str] = set()
    for figures in several:
        there = {
            name
            for name in quality_names([figures])
            if (value := figures[name]) is not None and not math.isnan(value) and _is_main(name)
        }
        found |= {*there - {LOSS}, *CLICKS} if "logloss" in there else there
    return quality_names([found]) or list(CLICKS)


def _is_main(name: str) -> bool:
    metric = named(name)
    return not isinstance(metric, Metric) or metric.main


def qualities(report: Mapping[str, Any]) -> Mapping[str, Figures]:
    """The figures of quality of each label by its name; of a single label by ''."""
    found: Mapping[str, Figures] = report.get(BY_LABEL) or {"": report["quality"]}
    return found


def labelled(figures: Figures) -> list[tuple[str, float | None]]:
    """The figures to show for one run, with their labels."""
    return [(title(name), figures.get(name)) for name in shown_figures([figures])]
