"""The figures of a monitor's windows beside the package's reference figures, and what is off in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers import figures as drift
from recpipe.model.metrics import judge, named
from recpipe.model.scores import Kind, Scores
from recpipe_serve.monitor.windows import AGAIN, JOINED, REFUSED, SCORED, TOTALLED, UNKNOWN, Windows

ENOUGH = 1000
"""Samples, scored or labelled, from which on something is said to be off."""
NOT_KNOWN = {"window": None, "reference": None}
_NOT_JUDGED = ("logloss", "pr_auc")
"""Figures that move with the share of clicks; NE and AUC do not."""


@dataclass(frozen=True)
class Compared:
    """What a monitor says."""

    off: list[str]
    """Sentences on what is not as in the reference."""
    notes: list[str]
    """Other sentences."""
    figures: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"off": self.off, "notes": self.notes, **self.figures}


def compare(
    manifest: Mapping[str, Any], bound: float, windows: Sequence[Windows], quality: Mapping[str, Any]
) -> Compared:
    """The figures of all workers' ``windows``, and ``quality`` as of ``judged_labels``. A population
    stability index above ``bound`` is off."""
    reference = manifest.get("reference")
    scores = np.concatenate([own.latest(SCORED) for own in windows])
    outputs = {output["name"]: output["kind"] for output in manifest["outputs"]}
    totals = np.sum([own.totals for own in windows], axis=0)
    totalled = sum(int(own.heads[TOTALLED]) for own in windows)
    posted = np.sum([own.posted for own in windows], axis=0)
    figures: dict[str, Any] = {
        "samples": {
            "window": len(scores),
            "since_start": sum(int(own.heads[SCORED]) for own in windows),
            "reference": reference and reference["samples"],
        },
        "scores": {
            task: _of_scores(kind, scores[:, n], totals[n], totalled, reference and reference["tasks"][task])
            for n, (task, kind) in enumerate(outputs.items())
        },
        "ids": _of_ids(manifest, windows, reference),
        "labels": {
            "samples": quality["samples"],
            "requests": {
                name: int(posted[place])
                for name, place in (("joined", JOINED), ("unknown", UNKNOWN), ("again", AGAIN))
            },
            "refused_posts": int(posted[REFUSED]),
            "tasks": {
                task: {
                    name: {**value, "reference": reference and reference["tasks"][task]["figures"].get(name)}
                    for name, value in quality["tasks"][task].items()
                }
                for task in outputs
            },
        },
    }
    return Compared(*_said(figures, reference, bound), figures)


def judged_labels(tasks: Mapping[str, Kind], pairs: Sequence[NDArray[np.float32]]) -> dict[str, Any]:
    """The quality of scores whose labels have come, ``pairs`` [N, 2, T]: of each task's figures the value and
    the ends of its 95% interval, as of ``judge``."""
    joined = np.concatenate(list(pairs))
    found: dict[str, Any] = {}
    samples: dict[str, int] = {}
    for n, (task, kind) in enumerate(tasks.items()):
        own = torch.from_numpy(joined[~np.isnan(joined[:, 1, n])][:, :, n])
        samples[task] = len(own)
        scores, labels = own[:, 0].contiguous(), own[:, 1].contiguous()
        found[task] = judge(Scores(kind, labels, scores)).to_dict()["figures"] if len(own) else {}
    return {"samples": samples, "tasks": found}


def _of_scores(
    kind: Kind, scores: NDArray[np.float32], totals: NDArray[Any], totalled: int, known: Any
) -> dict[str, Any]:
    """One task's scores."""
    finite = scores[np.isfinite(scores)]
    share = 1 / max(1, len(scores))
    found: dict[str, Any] = {
        "mean": {
            "window": float(drift.predictions(kind, finite).mean()) if len(finite) else None,
            "since_start": _number(totals[-1] / max(1, totalled)),
            "reference": known and known["mean"]["prediction"],
        },
        "not_finite": (len(scores) - len(finite)) * share,
    }
    if kind == "clicks":
        found["saturated"] = {
            "window": drift.saturated(finite) * share,
            "reference": known and known["saturated"],
        }
    if known:
        inner, counts = known["edges"], known["counts"]
        found["drift"] = {
            "window": _number(drift.stability(drift.histogram(scores, inner), counts)),
            "since_start": _number(drift.stability(totals[: len(counts)], counts)),
        }
        outside = (finite < known["lowest"]) | (finite > known["highest"])
        found["outside"] = int(outside.sum()) * share
    return found


def _of_ids(manifest: Mapping[str, Any], windows: Sequence[Windows], reference: Any) -> dict[str, Any]:
    features = [feature["name"] for feature in manifest["sparse"]]
    counted = np.sum([own.ids.sum(axis=0) for own in windows], axis=0)
    wrong = np.sum([own.wrong for own in windows], axis=0)
    unknown = np.sum([own.unknown for own in windows], axis=0)
    samples, (each, first, without) = counted[0], counted[1:].reshape(3, -1)
    found: dict[str, Any] = {}
    for n, name in enumerate(features):
        known = reference["features"][name] if reference else {"row_0": None, "ids_per_sample": None}
        found[name] = {
            "row_0": {"window": float(first[n] / each[n]) if each[n] else None, "reference": known["row_0"]},
            "per_sample": {
                "window": float(each[n] / samples) if samples else None,
                "reference": known["ids_per_sample"],
            },
            "out_of_range": int(wrong[n]),
        }
        if "map" in manifest["sparse"][n]:
            share = float(without[n] / each[n]) if each[n] else None
            found[name]["unknown"] = {"window": share, "reference": known.get("unknown")}
            found[name]["unknown_since_start"] = int(unknown[n])
    return found


def _said(figures: Mapping[str, Any], reference: Any, bound: float) -> tuple[list[str], list[str]]:
    """What is off, and what else there is to say."""
    off: list[str] = []
    notes: list[str] = []
    samples = figures["samples"]["window"]
    for task, own in figures["scores"].items():
        if own["not_finite"]:
            off.append(f"{own['not_finite']:.2%} of the scores of '{task}' are no finite numbers")
    if reference is None:
        notes.append(
            "the package has no reference figures, so that nothing is compared: package the checkpoint where "
            "its data are"
        )
    elif samples < ENOUGH:
        notes.append(f"{samples:,} samples so far: from {ENOUGH:,} on they are compared with the reference")
    else:
        for task, own in figures["scores"].items():
            index, mean = own["drift"]["window"], own["mean"]
            known_samples = figures["samples"]["reference"]
            counted = f"PSI {_short(index)} (reference {known_samples:,} samples, window {samples:,})"
            means = (
                f"their mean prediction is {_short(mean['window'])}, in the reference "
                f"{_short(mean['reference'])}"
            )
            if index is None or index > bound:
                limit = f"above {bound:g} is taken as drift"
                off.append(f"scores of '{task}' drifted: {counted}; {limit}; {means}")
            else:
                notes.append(f"scores of '{task}' are as in the reference: {counted}; {means}")
            found = own.get("saturated") or {"window": 0.0, "reference": 0.0}
            share, known = found["window"], found["reference"]
            if share > known and _apart(share, known) > bound:
                off.append(
                    f"{share:.1%} of the scores of '{task}' are saturated (a probability within "
                    f"{drift.SATURATED:g} of 0 or 1), in the reference {known:.1%}"
                )
        for feature, own in figures["ids"].items():
            for row, what in (
                (own["row_0"], "are row 0, which stands for a missing value"),
                (own.get("unknown", NOT_KNOWN), "have no row of their own"),
            ):
                if None not in row.values() and _apart(row["window"], row["reference"]) > bound:
                    off.append(
                        f"{row['window']:.1%} of the ids of '{feature}' {what}; in the reference "
                        f"{row['reference']:.1%}"
                    )
            count = own["per_sample"]
            each, usual = count["window"], count["reference"]
            if each is not None and not usual / 2 <= each <= usual * 2:
                off.append(f"'{feature}' has {each:.2f} ids for each sample, in the reference {usual:.2f}")
    for feature, own in figures["ids"].items():
        if own["out_of_range"]:
            notes.append(f"{own['out_of_range']:,} ids of '{feature}' were out of range, and refused")
    for task, own in figures["labels"]["tasks"].items():
        lines, is_off = _of_quality(task, figures["labels"]["samples"][task], own)
        (off if is_off else notes).extend(lines)
    return off, notes


def _of_quality(task: str, samples: int, own: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Figures whose interval does not touch the reference's are off, if they are worse."""
    worse: list[str] = []
    others: list[str] = []
    for name, found in own.items():
        known = found["reference"]
        if name in _NOT_JUDGED or known is None or None in (found["low"], known["low"], found["value"]):
            continue
        above, below = found["low"] > known["high"], found["high"] < known["low"]
        metric = named(name)
        assert metric is not None
        is_off = {"higher": below, "lower": above, "near 1": above or below}[metric.better]
        mine, theirs = (
            f"{_short(one['value'])} [{_short(one['low'])}, {_short(one['high'])}]" for one in (found, known)
        )
        line = f"{metric.label} {mine}, in the reference {theirs}"
        (worse if is_off and samples >= ENOUGH else others).append(line)
    counted = f"of '{task}' over the last {samples:,} labelled samples"
    if worse:
        return [f"quality {counted} is off: {'; '.join(worse)}"], True
    return ([f"quality {counted}: {'; '.join(others)}"] if others else []), False


def _apart(found: float, known: float) -> float:
    """The stability index of two shares."""
    return drift.stability([found * ENOUGH, (1 - found) * ENOUGH], [known * ENOUGH, (1 - known) * ENOUGH])


def _short(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3g}" if abs(value) < 1e4 else f"{value:.2e}"


def _number(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return float(value) if math.isfinite(value) else None
