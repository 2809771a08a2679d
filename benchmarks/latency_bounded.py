"""Latency-bounded throughput of DeepRecSys's models and of DLRM-DCNv2: every target, its sides in turn.

    python benchmarks/latency_bounded.py FOLDER                # packages that are not there, then all targets
    python benchmarks/latency_bounded.py FOLDER packages       # these alone
    python benchmarks/latency_bounded.py FOLDER batching int8  # some targets

``batching``  RMC1 to RMC3, and RMC2 with int8 rows: what bench-serve's search finds over DeepRecSys's own
              baseline, parts of 25 candidates (its largest request by its servers' 40 cores), and over what
              that is on these cores, every request cut at its largest size by their number
``int8``      RMC2: int8 rows over float32 rows
``sdm``       Wide & Deep with int8 rows, skewed ids: 25% of what its tables take in float32 in DRAM over all
              rows there; one process on all cores, since one is what keeps rows
``http``      RMC1 and RMC3: through a server of recpipe's over in process
``pairs``     DLRM-DCNv2 within 99.9% of its quality: user-item pairs a second a core, in process and through
              HTTP, and the share of what this core's matrix products and rows allow

The bound is 25 ms at p95 (``--bound-ms``), for ``pairs`` MLPerf's 60 ms at p99. All rates are valid by
LoadGen, of sides whose processes live beside each other and are loaded in turn, each from the rate on that it
had before; a rate that may be valid counts as not valid once two runs at it are not. A side of which no rate
is valid is told with the reason. Tables have ``--scale`` of the published rows. Each target writes
FOLDER/TARGET.json as soon as it is measured; ``--json`` writes the tables that docs/tables.py shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch
from recpipe_deeprecsys.bounded import BEGIN, LEAST, bisected, is_good, none_valid, too_slow
from recpipe_deeprecsys.command import (
    Setup,
    batching_of,
    climbed,
    cut_over_cores,
    deeprecsys_parts,
    fitting,
    set_up,
    told,
)
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.engine import Batching
from recpipe_deeprecsys.load import OFFLINE, SERVER, SINGLE_STREAM, Load, Outcome
from recpipe_deeprecsys.requests import Range
from recpipe_deeprecsys.search import best_of

from recpipe.common.device import one_thread
from recpipe.private_api.int8 import int8_run
from recpipe.profiling.limits import best_product, best_seconds, gathered
from recpipe.report.environment import environment

MODELS = ("rmc1", "rmc2", "rmc3")
BATCHED = ("rmc1", "rmc2", "rmc2_int8", "rmc3")
"""Whose batching is searched."""
# MLPerf Inference's samples have 100 to 700 user-item pairs; these are the quantiles of its distribution.
PAIRS = (*[100] * 2, *[200] * 12, *[300] * 2, 400, 500, 600, 700)
XEON_6 = 20_000
"""User-item pairs a second a core of MLPerf Inference v5.1's dlrm-v2-99.9, Offline, on a Xeon 6 (2025)."""
# The benchmark's shape with at most 500,000 rows a table: lookups and dense part are its own.
DCNV2 = (
    *("data=deeprecsys", "model=dlrm_dcn", "model.embedding_dim=128", "model.bottom=[512,256]"),
    *("model.top=[1024,1024,512,256]", "model.cross_layers=3", "model.cross_rank=512", "data.dense=13"),
)
ROWS = (
    *(500000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 500000, 500000, 405282, 10, 2209, 11938, 155),
    *(4, 976, 14, 500000, 500000, 500000, 500000, 12973, 108, 36),
)
HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
LAYERS = [
    *((13, 512), (512, 256), (256, 128)),
    *([(27 * 128, 512), (512, 27 * 128)] * 3),
    *((27 * 128, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)),
]
"""Inputs and outputs of DLRM-DCNv2's products."""
COUNTED = 1_000_000
"""Samples by which it is known which rows are looked up most."""
LEARNS = 100
"""Steps after which a model's quality can be judged."""
CORES = len(os.sched_getaffinity(0))
STATIC_PARTS, CUT, SEARCHED = "DeepRecSys's own parts", "requests cut over these cores, parts", "searched"
IN_PROCESS, HTTP = "in process", "http"
NAMES = {"rmc1": "RMC1", "rmc2": "RMC2", "rmc2_int8": "RMC2, int8 rows", "rmc3": "RMC3"}
WND = "Wide & Deep, skewed ids, one process on all cores"
"""The models of tables."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("targets", nargs="*", choices=["packages", *TARGETS], help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.25, help="of DeepRecSys's rows (default 0.25)")
    parser.add_argument("--models", nargs="*", choices=BATCHED, default=BATCHED, help="of batching")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a run of LoadGen's, at least")
    parser.add_argument("--queries", type=int, default=150, help="of a run of LoadGen's, at least")
    parser.add_argument("--bound-ms", type=float, default=25.0, help="at p95 (default 25)")
    parser.add_argument("--json", type=Path, help="a folder for the tables that docs/tables.py shows")
    asked = parser.parse_args()
    timed = (asked.seconds, asked.queries, asked.bound_ms)
    work = Work(asked.folder, asked.rounds, asked.scale, *timed, asked.models)
    work.packages()
    for name in asked.targets or TARGETS:
        if name == "packages":
            continue
        began = monotonic()
        report = {"target": name, **TARGETS[name](work), "seconds": monotonic() - began}
        report |= {"scale": asked.scale, "date": date.today().isoformat(), "environment": environment()}
        (asked.folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: {report['seconds']:.0f} s", flush=True)
    if asked.json is not None:
        write_tables(asked.folder, asked.json)


@dataclass(frozen=True)
class Side:
    """One of those that are compared: a package, and what bench-serve is told of it."""

    package: str
    options: BenchOptions
    rows: tuple[str, ...] = ()
    """The words of a plugin that keeps rows."""


class Loaded:
    """A side whose processes live; ``largest`` is a round of it."""

    def __init__(self, setup: Setup, load: Load, options: BenchOptions, requests: Sequence[Range]) -> None:
        self.setup, self.load, self.options, self.requests = setup, load, options, requests
        self.batching = batching_of(options)
        self.known: dict[Batching, float] = {}
        """The rate to begin with."""
        self.runs: list[Outcome] = []
        self.offline: dict[Batching, float] = {}
        """Requests/s."""
        self.why: str | None = None
        """Why the latest round has no valid rate."""

    def largest(self, batching: Batching | None = None) -> float:
        """The largest rate that LoadGen calls valid, requests/s; 0 if none is."""
        batching = batching or self.batching
        target = self.setup.use(batching)
        near = batching in self.known
        self.why = None
        if not near:
            single = self.load.run(target, SINGLE_STREAM)
            offline = self.load.run(target, OFFLINE, 1e3 / single.latency_ms["50"])
            self.offline[batching] = offline.completed
            self.runs += [single, offline]
            show(single)
            show(offline)
            if (why := too_slow(single, self.load)) is not None:
                self.why = why
                return 0.0
            self.known[batching] = BEGIN * offline.completed

        def run(rate: float) -> Outcome:
            outcome = self.load.run(target, SERVER, rate)
            show(outcome)
            self.runs.append(outcome)
            return outcome

        def good(outcome: Outcome) -> bool:
            return is_good(outcome, self.load)

        known, tolerance = self.known[batching], self.options.tolerance
        tried = bisected(run, known, good, tolerance, near, LEAST * self.offline[batching])
        found = max((one.rate or 0.0 for one in tried if good(one)), default=0.0)
        self.known[batching] = found or self.known[batching]
        if not found:
            self.why = none_valid(tried, self.load)
        return found


def show(outcome: Outcome) -> None:
    latency = ", ".join(f"p{name} {outcome.latency_ms[name]:.1f}" for name in ("50", "95", "99"))
    verdict = "VALID" if outcome.valid else "INVALID"
    at = f"{outcome.rate:.1f} requests/s" if outcome.rate is not None else outcome.scenario
    if outcome.cut:
        verdict = "ended early: too many were late"
    print(f"    {at}: {outcome.completed:.1f}/s, {latency} ms, {verdict}", flush=True)


@dataclass
class Work:
    """The packages, and how long everything is loaded."""

    folder: Path
    rounds: int
    scale: float
    seconds: float
    queries: int
    bound_ms: float = 25.0
    models: Sequence[str] = BATCHED
    """Whose batching is searched."""

    def packages(self) -> None:
        """Make those that are not there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        low = ["+plugin=low_precision", "plugins.low_precision.types=[int8]"]
        anyhow = ["plugins.low_precision.bound=1", "plugins.low_precision.model_bound=1"]
        rows_alone = [*low, *anyhow, "plugins.low_precision.dense=float32"]
        for name in (*MODELS, "wnd"):
            words = [f"experiment={name}", f"data.table_scale={self.scale}"]
            words += ["trainer.max_steps=2", "optim=sgd"]
            if name == "wnd":  # samples, so that popularity says of most rows how often they are looked up
                words += ["data.ids=skewed", f"data.samples={COUNTED}"]
            counted = ["popularity=true"] if name == "wnd" else []
            quantized = (f"{name}_int8", rows_alone, counted) if name in ("rmc2", "wnd") else None
            self._package(name, words, name != "wnd", quantized)
        tables = [f"{{rows: {rows}, lookups: {hot}}}" for rows, hot in zip(ROWS, HOT, strict=True)]
        words = [*DCNV2, f"data.tables=[{', '.join(tables)}]", f"trainer.max_steps={LEARNS}"]
        judged = [*low, "plugins.low_precision.bound=0.001", "plugins.low_precision.model_bound=0.001"]
        self._package("dcnv2", words, False, ("dcnv2_low", judged, ["dense=low"]))

    def _package(
        self,
        name: str,
        words: Sequence[str],
        float32: bool = True,
        int8: tuple[str, list[str], list[str]] | None = None,
    ) -> None:
        """Train a model, package it, and package it in low precision; what led to packages is removed."""
        wanted = [name] if float32 else []
        wanted += [int8[0]] if int8 is not None else []
        if all((self.folder / one).exists() for one in wanted):
            return
        run = self.folder / f"{name}.run"
        shutil.rmtree(run, ignore_errors=True)
        recpipe(*words, "trainer.limit_val_batches=1", f"hydra.run.dir={run}")
        if float32 and not (self.folder / name).exists():
            recpipe("package", str(run), str(self.folder / name), "reference=256")
        if int8 is not None and not (self.folder / int8[0]).exists():
            own, how, more = int8
            quantized = self.folder / f"{own}.quantized"
            place = [f"output={quantized}", "overwrite=true", f"hydra.run.dir={self.folder / own}.report"]
            recpipe("quantize", str(run), *how, *place)
            recpipe("package", str(quantized), str(self.folder / own), "reference=256", *more)
            shutil.rmtree(quantized)
        shutil.rmtree(run)

    def options(self, **words: Any) -> BenchOptions:
        """Of bench-serve."""
        own = {"seconds": self.seconds, "queries": self.queries, "bound_ms": self.bound_ms}
        return BenchOptions(**{**own, **words})

    @contextmanager
    def loaded(self, sides: Mapping[str, Side]) -> Iterator[dict[str, Loaded]]:
        """All ``sides``, with their processes."""
        with ExitStack() as stack:
            found = {}
            for name, side in sides.items():
                options = fitting(side.options, side.rows)
                place = self.folder / "runs" / name.replace(" ", "_")
                place.mkdir(parents=True, exist_ok=True)
                print(f"  {name}: {side.package} starts", flush=True)
                setup, requests = stack.enter_context(
                    set_up(self.folder / side.package, options, side.rows, place)
                )
                load = Load(
                    *(len(requests), options.bound_ms, f"{options.percentile:g}", options.seconds),
                    *(options.queries, options.seed, None, True),
                )
                found[name] = Loaded(setup, load, options, requests)
            yield found

    def in_turn(self, runs: Mapping[str, tuple[Loaded, Batching]]) -> dict[str, Any]:
        """Rounds of the ``runs``: requests/s of each, why one has none, and the ratios of the last to each
        of the others."""
        found: dict[str, list[float]] = {name: [] for name in runs}
        why: dict[str, str] = {}
        for _ in range(self.rounds):
            for name, (loaded, batching) in runs.items():
                if name in why:
                    continue  # no rate was valid, which takes long to find out
                print(f"  {name}:", flush=True)
                rate = loaded.largest(batching)
                if loaded.why is None:
                    found[name].append(rate)
                elif not found[name]:
                    why[name] = loaded.why
                    print(f"    {loaded.why}", flush=True)
                else:
                    found[name].append(0.0)
        last, ratios = list(runs)[-1], {}
        for name in list(runs)[:-1]:
            ratios[name] = [b / a for a, b in zip(found[name], found[last], strict=False) if a]
            print(f"  {last} over {name}: {[round(r, 2) for r in ratios[name]]}", flush=True)
        return {"rates": found, "ratios": ratios, "why": why}

    def compared(self, sides: Mapping[str, Side]) -> dict[str, Any]:
        """Rounds of two sides."""
        with self.loaded(sides) as found:
            told = self.in_turn({name: (one, one.batching) for name, one in found.items()})
            told["offline"] = {name: one.offline[one.batching] for name, one in found.items()}
            told["batchings"] = {name: asdict(one.batching) for name, one in found.items()}
            told["runs"] = {name: [asdict(run) for run in one.runs] for name, one in found.items()}
        return told


# -- targets -----------------------------------------------------------------------------


def batching(work: Work) -> dict[str, Any]:
    """What is searched, then in turn with DeepRecSys's baseline and with what that is on these cores."""
    found = {}
    for name in work.models:
        options = work.options(tolerance=0.05)
        begin = replace(options, batch=-(-options.size_max // CORES))
        with work.loaded({name: Side(name, begin)}) as sides:
            one = sides[name]
            short = replace(one.load, queries=min(work.queries, 200))
            sizes = [high - low for low, high in one.requests]
            before, tried = climbed(one.setup, short, replace(one.options, tolerance=0.08), sizes)
            compared = {STATIC_PARTS: deeprecsys_parts(one.options), CUT: cut_over_cores(one.options)}
            compared[SEARCHED] = best_of(tried).batching if tried else one.batching
            print(f"  {name}: {told(compared[SEARCHED]) if tried else before.why}", flush=True)
            turns: dict[str, Any] = {"rates": {}, "ratios": {}, "why": {SEARCHED: before.why}}
            if tried:
                turns = work.in_turn({what: (one, batching) for what, batching in compared.items()})
            own = {"batchings": {what: asdict(batching) for what, batching in compared.items()}}
            own |= {"tried": [asdict(t) for t in tried], "runs": [asdict(run) for run in one.runs]}
            found[name] = {**turns, **own}
    return {"models": found}


def int8(work: Work) -> dict[str, Any]:
    """RMC2's rows in float32 and in int8, cut alike: as was searched for float32, if that was."""
    kept = work.folder / "batching.json"
    models = json.loads(kept.read_text())["models"] if kept.is_file() else {}
    searched = models["rmc2"]["batchings"][SEARCHED] if "rmc2" in models else {"batch": 64}
    words = {key: searched[key] for key in ("batch", "wait_ms", "workers") if key in searched}
    options = work.options(tolerance=0.05, **words)
    return {
        **work.compared({"float32": Side("rmc2", options), "int8": Side("rmc2_int8", options)}),
        "batching": words,
    }


def sdm(work: Work) -> dict[str, Any]:
    """Wide & Deep's int8 rows all in DRAM, and 25% of what they take in float32. On one core a request alone
    takes half the bound: the one process scores with all cores. What is looked up often does not change here,
    and the package says what that is: rows do not change places."""
    options = work.options(workers=1, threads=CORES, ids="skewed", tolerance=0.05)
    rows = ("+plugin=sdm", "plugins.sdm.dram=25%", "plugins.sdm.admission=static")
    return work.compared({"dram": Side("wnd_int8", options), "sdm": Side("wnd_int8", options, rows)})


def http(work: Work) -> dict[str, Any]:
    """RMC1 and RMC3 in process and through a server, which cuts nothing: of RMC3, of which a request alone
    takes most of the bound on one core, the server has one process that scores with all cores."""
    options = work.options(batch=512, tolerance=0.05)
    one = replace(options, http=True, workers=1, threads=CORES)
    sides = {
        "rmc1": {IN_PROCESS: Side("rmc1", options), HTTP: Side("rmc1", replace(options, http=True))},
        "rmc3": {IN_PROCESS: Side("rmc3", replace(options, batch=128)), HTTP: Side("rmc3", one)},
    }
    return {"models": {name: work.compared(own) for name, own in sides.items()}}


def pairs(work: Work) -> dict[str, Any]:
    """User-item pairs a second a core, in process and through HTTP, beside what the core allows."""
    sizes = work.folder / "pairs.txt"
    sizes.write_text("".join(f"{size}\n" for size in PAIRS))
    options = work.options(
        sizes=str(sizes),
        bound_ms=2.4 * work.bound_ms,
        percentile=99.0,
        batch=128,
        queries=700,
        tolerance=0.05,
    )
    one = replace(options, http=True, workers=1, threads=CORES)  # nothing is cut there
    found = work.compared({IN_PROCESS: Side("dcnv2_low", options), HTTP: Side("dcnv2_low", one)})
    report = json.loads((work.folder / "dcnv2_low.report" / "report.json").read_text())
    limit = limit_of(report["dense"]["layers"])
    mean = sum(PAIRS) / len(PAIRS)
    each = {n: [rate * mean / CORES for rate in rates] for n, rates in found["rates"].items() if rates}
    offline = {name: rate * mean / CORES for name, rate in found["offline"].items()}
    for name, rates in each.items():
        share = median(rates) / limit["pairs"]
        print(f"  {name}: {median(rates):,.0f} pairs a second a core, {share:.0%} of its limit", flush=True)
    quality = {
        key: report["test"][key] for key in ("float32", "quantized", "ne_difference", "auc_difference")
    }
    return {**found, "pairs": each, "offline_pairs": offline, "limit": limit, "quality": quality}


def limit_of(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The most pairs a second of one core: products at the best rates of its matrix products in the types of
    ``layers`` (of a quantizer's report), then rows of 132 bytes at the best rate of random ones."""
    cpu = torch.device("cpu")
    operations = dict.fromkeys(("float32", "bfloat16", "int8"), 0.0)
    operations["float32"] = float(sum(2 * inputs * outputs for inputs, outputs in LAYERS))
    for layer in layers.values():
        if layer["type"] in operations and layer["type"] != "float32":
            own = 2.0 * layer["inputs"] * layer["outputs"]
            operations[layer["type"]] += own
            operations["float32"] -= own
    with one_thread(), torch.inference_mode():
        rates = {}
        for kind in (torch.float32, torch.bfloat16):
            amount, seconds = best_product(kind, cpu)
            rates[str(kind).removeprefix("torch.")] = amount / seconds
        # Few inputs and many outputs: coding the inputs takes next to nothing of it.
        inputs, outputs, samples = 4096, 16384, 256
        codes = torch.ones(outputs, inputs, dtype=torch.int8)
        product = int8_run(codes, torch.ones(outputs), None, 1.0, 0, 255)
        given = torch.rand(samples, inputs)
        rates["int8"] = 2.0 * inputs * outputs * samples / best_seconds(partial(product, given), cpu)
        row = 132
        amount, seconds = gathered(torch.ones(2**28 // row, row // 4))
        rows = amount / seconds
    took = sum(operations[kind] / rates[kind] for kind in operations) + sum(HOT) * row / rows
    return {"operations": operations, "rates": rates, "row_bytes_per_s": rows, "pairs": 1 / took}


TARGETS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "batching": batching,
    "int8": int8,
    "sdm": sdm,
    "http": http,
    "pairs": pairs,
}


def recpipe(*words: str) -> None:
    """Run recpipe in a process of its own."""
    print("recpipe", *words, flush=True)
    subprocess.run([sys.executable, "-m", "recpipe", *words], check=True, stdout=subprocess.DEVNULL)


# -- tables ------------------------------------------------------------------------------


def write_tables(folder: Path, into: Path) -> None:
    """latency_bounded.json and latency_bounded_pairs.json in ``into``, of what ``folder`` has."""
    reports = {
        name: json.loads(file.read_text()) for name in TARGETS if (file := folder / f"{name}.json").is_file()
    }
    rows = []
    for name, own in reports.get("batching", {"models": {}})["models"].items():
        best = own["batchings"][SEARCHED]
        how = f"searched: batches of {best['batch']}, {best['wait_ms']:g} ms, {best['workers']} processes"
        how = SEARCHED if SEARCHED in own["why"] else how
        for what, wanted in ((STATIC_PARTS, "1.5"), (CUT, "")):
            parts = f"{what}: {own['batchings'][what]['batch']}"
            rows.append(_row(NAMES[name], what, SEARCHED, own, wanted, parts, how))
    if "int8" in reports:
        rows.append(_row("RMC2", "float32", "int8", reports["int8"], "1.3", "float32 rows", "int8 rows"))
    if "sdm" in reports:
        both = "all int8 rows in DRAM", "25% of float32's bytes there (SDM)"
        rows.append(
            _row(
                "Wide & Deep, skewed ids, one process on all cores",
                "dram",
                "sdm",
                reports["sdm"],
                "0.85",
                *both,
            )
        )
    for name, own in reports.get("http", {"models": {}})["models"].items():
        threads = own["batchings"][HTTP]["threads"]
        how = f"through HTTP, {threads} threads" if threads > 1 else "through HTTP"
        rows.append(_row(NAMES[name], IN_PROCESS, HTTP, own, "", IN_PROCESS, how))
    number = "{:,.0f}"
    columns = {"model": None, "this": None, "requests/s": number, "over this": None, "requests/s ": number}
    columns |= {"ratio": "{:.2f}", "wanted": None}
    about = "LoadGen's largest valid rates at p95 <= 25 ms"
    _write(
        into / "latency_bounded.json", f"Requests/s within a latency bound: {about}", columns, rows, reports
    )
    if "pairs" not in reports:
        return
    own = reports["pairs"]
    limit = own["limit"]["pairs"]
    rows = [
        [f"here, {name}", *_cells(each), f"{median(each) / limit:.0%}"] for name, each in own["pairs"].items()
    ]
    rows += [
        [f"here, {name}, offline", *_cells([rate]), f"{rate / limit:.0%}"]
        for name, rate in own["offline_pairs"].items()
    ]
    rows.append(["Xeon 6, MLPerf Inference v5.1, offline, 2025", XEON_6, None, ""])
    columns = {
        "DLRM-DCNv2 at 99.9%": None,
        "pairs/s a core": number,
        "rounds": number,
        "of the core's limit": None,
    }
    title = "User-item pairs a second a core, DLRM-DCNv2: p99 <= 60 ms, or offline"
    _write(into / "latency_bounded_pairs.json", title, columns, rows, {"pairs": own})


def _cells(rounds: Sequence[float]) -> list[Any]:
    return [median(rounds), {"rounds": list(rounds)} if len(rounds) > 1 else None]


def _row(
    model: str, first: str, second: str, own: Mapping[str, Any], wanted: str, this: str, other: str
) -> list[Any]:
    """One comparison of two sides, of their rounds and the ratios of these; why there are none."""
    ratios = own["ratios"].get(first, [])
    why = next((own["why"][name] for name in (first, second) if name in own["why"]), "not measured")
    said = re.split("[:;] raise", why)[0]
    ratio = [median(ratios), min(ratios), max(ratios)] if ratios else said
    rounds = [own["rates"].get(name) for name in (first, second)]
    a, b = ({"rounds": each} if each else "none is valid" for each in rounds)
    return [model, this, a, other, b, ratio, wanted]


def _write(
    file: Path, title: str, columns: Mapping[str, Any], rows: Sequence[Any], reports: Mapping[str, Any]
) -> None:
    """A result for docs/tables.py."""
    about = next(iter(reports.values()))
    made = about["environment"]
    result = {
        "title": title,
        "command": "python benchmarks/latency_bounded.py FOLDER --json benchmarks/results",
        "machine": f"{made['cores']} cores of {made['cpu']}, a virtual machine",
        "commit": (made["commit"] or "")[:8],
        "date": about["date"],
        "kept": f"each round; tables of {about['scale']:g} of the published rows",
        "columns": columns,
        "rows": rows,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
