"""Predicted against measured: steps of runs whose tables are in tiers, with and without plugins.

    python benchmarks/perf_tiers.py [--data WORD] [--repetitions 2] [--resident measured] [--criteo FILE]

Each run is short and trained in this process, resident ones among the others; the later half of its steps
counts, when caches have filled. The machine's profile is that of ``recpipe perf calibrate``. A prediction
knows the profile, the data's statistics and the model's operators. With ``--resident measured`` it also knows
the time of the resident step, so that the error is that of the tiers alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import numpy as np
import torch
from recpipe_perf_model.advise.judged import Paper
from recpipe_perf_model.calibrate import calibrate
from recpipe_perf_model.facts.collect import collect
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.kernels.linear import MoveTimes
from recpipe_perf_model.machine import Host, MachineProfile, profile_path
from recpipe_perf_model.statement import Statement
from recpipe_perf_model.step.amounts import Amounts
from recpipe_perf_model.step.step import reading, step_amounts
from recpipe_perf_model.step.walk import Task
from recpipe_perf_model.tiers.predict import (
    RESIDENT,
    TieredPrediction,
    of_policy,
    predict_tiered,
    resident_steps,
)
from recpipe_perf_model.tiers.tiered import LOOK_UP, UPDATE, Resident, ResidentStep

import recpipe
from recpipe.common.process import quieted
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.make import open_dataset
from recpipe.plugin.load import activate
from recpipe.setup.ctx import choose_device
from recpipe.setup.placing import Unplaced

COMMON = (
    "trainer.device=cpu", "trainer.logger=null", "trainer.checkpoint_every=null", "trainer.progress=false",
    "trainer.eval_every=1.0", "data.eval_fraction=0.02",
)  # fmt: skip
POLICIES = ("nocache", "lru", "lfu")
SLOW = 1.05
"""A gain or a loss counts from here on."""
BATCHES = 300
"""Batches that are read for statistics at most: all of a run's here."""


@dataclass(frozen=True)
class Setting:
    """Data and model, a store and budgets, and what runs on them."""

    name: str
    words: tuple[str, ...]
    store: str
    shares: tuple[float, ...]
    rows: tuple[str, ...]


def settings(criteo: Path | None) -> list[Setting]:
    """All of them."""
    generated = ("data=synthetic", "data.samples=170000", "data.batch_size=2048")
    wide = ("data=synthetic", "data.samples=82000", "data.batch_size=1024", "model.embedding_dim=64",
            "data.table_scale=0.5")  # fmt: skip
    everything = (*POLICIES, "hotline", "bagpipe", "fae", "slipstream")
    found = [
        Setting("generated", generated, "host", (0.1,), (*POLICIES, "hotline", "fae", "slipstream")),
        Setting("generated", generated, "ssd", (0.1,), everything),
        Setting("generated, dim 64", wide, "ssd", (0.02, 0.3), ("lru", "hotline", "bagpipe")),
    ]
    if criteo is not None:
        real = ("data=criteo", f"data.path={criteo}", "data.batch_size=512")
        found += [
            Setting("Criteo", real, "host", (0.05,), ("nocache", "lru", "hotline", "bagpipe")),
            Setting(
                "Criteo", real, "ssd", (0.05, 0.3), ("nocache", "lru", "lfu", "hotline", "bagpipe", "fae")
            ),
        ]
    return found


@dataclass
class Measured:
    """The later half of a run's steps."""

    seconds: list[float] = field(default_factory=list)
    missed: float = float("nan")
    report: Mapping[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="", help="settings whose names contain this")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--criteo", type=Path, help="a file of Criteo rows; left out without")
    parser.add_argument("--resident", choices=("measured", "predicted"), default="predicted")
    parser.add_argument("--profile", type=Path, help="another profile than this machine's own")
    parser.add_argument("--keep", type=Path, help="a folder in which measured times are kept, and found")
    parser.add_argument("--json", type=Path, help="where the table goes too")
    arguments = parser.parse_args()
    profile = calibrate(arguments.profile or profile_path(Host.current()), False)
    lines: list[dict[str, Any]] = []
    for setting in settings(arguments.criteo):
        if arguments.data in setting.name or arguments.data in setting.store:
            runs = measured(setting, arguments.repetitions, arguments.keep)
            lines += judged(setting, profile, runs, arguments.resident == "measured")
    show(lines)
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1))


def measured(setting: Setting, repetitions: int, keep: Path | None) -> dict[tuple[str, float], Measured]:
    """Run everything in one setting, by row and budget."""
    kept = None if keep is None else keep / f"{setting.name}-{setting.store}.json".replace(" ", "-")
    if kept is not None and kept.exists():
        return {(row, share): Measured(**run) for row, share, run in json.loads(kept.read_text())}
    runs: dict[tuple[str, float], Measured] = {}
    for _ in range(repetitions):
        for share in setting.shares:
            for row in ("resident", *setting.rows):
                place = setting.shares[0] if row == "resident" else share
                once(runs.setdefault((row, place), Measured()), words(setting, row, share))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([(row, share, vars(run)) for (row, share), run in runs.items()]))
    return runs


def judged(
    setting: Setting, profile: MachineProfile, runs: Mapping[tuple[str, float], Measured], known: bool
) -> list[dict[str, Any]]:
    """Predict what was measured in one setting; ``known``: from the measured resident step."""
    facts, read = statistics(setting)
    times = MoveTimes.of(profile)
    seconds = median(runs["resident", setting.shares[0]].seconds)
    if known:
        return compared(setting, facts, times, runs, partial(as_measured, facts, times, seconds, read))
    Captures.amounts, Captures.found = step_amounts(profile), []
    Captures.use = partial(compared, setting, facts, times, runs)
    callback = "trainer.callbacks=[{_target_: __main__.Captures}]"
    recpipe.train(
        None,
        None,
        *words(setting, "resident", setting.shares[0]),
        callback,
        "trainer.max_steps=1",
        quiet=True,
    ).close()
    return Captures.found


class Captures(L.Callback):
    """Hands the resident step of a run, of any number of samples, to ``use`` before the first step."""

    amounts: Amounts
    use: Callable[[Resident], list[dict[str, Any]]]
    found: list[dict[str, Any]]

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        model, source = pl_module.model, pl_module.loader.source
        batch = next(source.dataset.batches("train", source.batch_size))
        read = reading(source.dataset, source.batch_size, model.inputs)
        optimizer = type(trainer.optimizers[0]).__name__
        paper = Paper(model, pl_module.backend, batch, optimizer, read)
        Captures.found = type(self).use(resident_steps(paper.step, self.amounts))


def compared(
    setting: Setting,
    facts: Facts,
    times: MoveTimes,
    runs: Mapping[tuple[str, float], Measured],
    resident: Resident,
) -> list[dict[str, Any]]:
    """The lines of one setting's table."""
    measured_ms = 1e3 * median(runs["resident", setting.shares[0]].seconds)
    told = predict_tiered(facts, {}, RESIDENT, times, resident, cores=torch.get_num_threads())
    predicted_ms = 1e3 * told.step_seconds
    found = []
    for (row, share), run in runs.items():
        if row == "resident":
            continue
        at = facts.at(share=share, store=setting.store)
        prediction = predicted(at, row, setting, times, resident)
        found.append(
            {
                "data": setting.name, "store": setting.store, "share": share, "row": row,
                "resident_ms": measured_ms, "resident_told_ms": predicted_ms,
                "measured_ms": 1e3 * median(run.seconds),
                "predicted_ms": 1e3 * prediction.step_seconds,
                "tried_ms": [1e3 * each for each in prediction.tried],
                "missed": run.missed,
                "predicted_missed": prediction.missed,
                "critical": {
                    name: 1e3 * seconds
                    for kind in prediction.kinds[-1:]
                    for name, seconds in kind.walked.critical.items()
                },
                "io": {
                    name: 1e3 * run.report["io"][name] / run.report["steps"]
                    for name in ("fetch_seconds", "write_seconds", "wait_seconds")
                },
                "verdict": [
                    figures.get("verdict", "") for figures in run.report["plugins"].values()
                ],
            }
        )  # fmt: skip
    return found


def words(setting: Setting, row: str, share: float) -> list[str]:
    """The command line of one run."""
    found = [
        *setting.words,
        *COMMON,
        f"tiers.store={setting.store}",
        f"tiers.resident_bytes={100 * share:g}%",
    ]
    if row in (*POLICIES, "resident"):
        return [*found, f"tiers.policy={row}"]
    return [*found, f"+plugin=[{row.replace('+', ',')}]"]


def once(run: Measured, overrides: Sequence[str]) -> None:
    """Train, and keep the later half."""
    with recpipe.train(None, None, *overrides, quiet=True) as trained:
        report = trained.report
    series = report["series"]
    half = len(series["samples_per_second"]) // 2
    size = report["recipe"]["data"]["batch_size"]
    run.seconds += [size / speed for speed in series["samples_per_second"][half:-1]]
    if series["lookups"]:
        run.missed = 1 - sum(series["hits"][half:]) / max(1, sum(series["lookups"][half:]))
    run.report = {**report, "steps": sum(report["throughput"]["step_histogram"]["counts"])}


def statistics(setting: Setting) -> tuple[Facts, float]:
    """The data's, and the time to read a batch."""
    with quieted():
        cfg = Recipe.of(compose([*setting.words, *COMMON]))
        dataset = open_dataset(cfg.data, cfg.seed, None)
        unplaced = Unplaced.of(cfg, dataset, choose_device("cpu"), None)
        size = cfg.data.batch_size
        batches = min(BATCHES, dataset.num_batches("train", size))
        facts = collect(cfg, dataset, unplaced.inputs, batches, batches)
        seconds = []
        began = perf_counter()
        for _, batch in zip(range(20), dataset.batches("train", size), strict=False):
            unplaced.inputs.each(batch)
            seconds.append(perf_counter() - began)
            began = perf_counter()
    return facts, median(seconds)


def predicted(
    facts: Facts, row: str, setting: Setting, times: MoveTimes, resident: Resident
) -> TieredPrediction:
    """The step of one run."""
    base = of_policy(row if row in POLICIES else "resident", facts)
    stated: dict[str, Statement] = {}
    if row not in POLICIES:
        composed = compose([*words(setting, row, facts.share)])
        for origin, plugin in activate(Recipe.of(composed).plugins):
            statement = plugin.costs(facts)
            assert statement is not None, f"{origin} states nothing"
            stated[origin.plugin] = statement
    return predict_tiered(facts, stated, base, times, resident, cores=torch.get_num_threads())


def as_measured(facts: Facts, times: MoveTimes, whole: float, reading: float, samples: int) -> ResidentStep:
    """The resident step from its measured time; all that is not lookups is taken as the samples' work."""
    look_up, update = tables(facts, times)
    dense = max(0.2 * whole, whole - look_up - update) * samples / facts.batch_size
    tasks = [
        Task("read", "loader", reading),
        Task(LOOK_UP, "main", look_up, after={"read": 0}),
        Task("forward and backward", "main", dense, cores=torch.get_num_threads()),
        Task(UPDATE, "main", update),
        Task("loop", "main"),
    ]
    return ResidentStep(tasks, look_up, update)


def tables(facts: Facts, times: MoveTimes) -> tuple[float, float]:
    """Seconds to look up and to update resident tables."""
    found = [0.0, 0.0]
    for group in facts.groups:
        at = {
            "bags": float(facts.batch_size * group.features), "hits": group.lookups, "hot": group.distinct,
            "slab": 0.0, "slab_lookups": 0.0, "dim": float(group.dim), "slots": float(group.rows),
        }  # fmt: skip
        for number, kind in enumerate(("slots forward", "slots update")):
            found[number] += times.seconds(kind, at)
    return found[0], found[1]


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """The table, and the errors over all of it."""
    print(f"{'data':<18}{'store':<6}{'budget':>7}  {'row':<11}{'resident':>9}{'measured':>10}"
          f"{'predicted':>10}{'error':>8}{'missed':>9}{'told':>9}")  # fmt: skip
    errors, right, judged = [], 0, 0
    for line in lines:
        error = line["predicted_ms"] / line["measured_ms"] - 1
        errors.append(error)
        gain = line["resident_ms"] / line["measured_ms"]
        told = line["resident_told_ms"] / line["predicted_ms"]
        if gain > SLOW or gain < 1 / SLOW:
            judged += 1
            right += (gain > 1) == (told > 1)
        print(f"{line['data']:<18}{line['store']:<6}{line['share']:>7.0%}  {line['row']:<11}"
              f"{line['resident_ms']:>9.2f}{line['measured_ms']:>10.2f}{line['predicted_ms']:>10.2f}{error:>8.0%}"
              f"{line['missed']:>9.2%}{line['predicted_missed']:>9.2%}")  # fmt: skip
    size = np.abs(errors)
    apart = max(abs(line["missed"] - line["predicted_missed"]) for line in lines)
    print(f"{len(errors)} pairs: geometric mean of the errors {np.exp(np.mean(np.log(size + 4e-4))):.1%}, "
          f"mean {size.mean():.1%}, p90 {np.quantile(size, 0.9):.1%}; "
          f"slower or faster than resident told right in {right} of {judged}; "
          f"misses told within {100 * apart:.2f} points")  # fmt: skip


if __name__ == "__main__":
    main()
