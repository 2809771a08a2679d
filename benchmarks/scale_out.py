"""What a package costs that is cut into shards, beside one server, and what is predicted of it.

    python benchmarks/scale_out.py --calibrate                        once: constants for plan=latency
    python benchmarks/scale_out.py --models drm1 --shards 8           a part of the measurement
    python benchmarks/scale_out.py --json benchmarks/results          the tables, of all parts so far

Models of the shapes of DRM1, DRM2 and DRM3 (scale_out_models.py) are cut by each plan; ``ours`` is
plan=latency with a tenth of the bytes at the main server, ``load main`` the same with plan=load; a shard has
memory for ``--memory`` times an equal part. Shards are processes behind links of each of ``--links``
(Gbit/s:microseconds): network namespaces with tbf where they can be made, else the relay's own limit; the
delay is the relay's (relay.c). A request is one user with half of the features and 64 candidates with the
other half; ids are skewed. Requests come at random, ``--rate`` a second; single server and shards take turns,
the others are stopped meanwhile. Before that requests come at regular times, one at a time and several at
once, over ``--quiet-link``: from these traces the queueing model predicts what is measured afterwards
(scale_out_predicted.py), and the same at 25 and 100 Gbit/s.

Lines are kept in ``--work`` as they are measured, so that a part that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recpipe_perf_model import Costs, simulated
from recpipe_perf_model import Load as Expected
from scale_out_models import MODELS, packaged, requests, user_features
from scale_out_network import BURST, Network, can_make_namespaces
from scale_out_predicted import Known, Traced, link, measured_costs, parts_of, servers_of
from scale_out_servers import Links, Side, compiled, sharded, single
from scale_out_tables import report

PLANS = {
    "capacity": ("plan=capacity",),
    "load": ("plan=load",),
    "net": ("plan=net",),
    "load main": ("plan=load", "main="),
    "ours": ("plan=latency", "main=", "costs="),
}
MEASURED = ["capacity", "load", "net", "ours"]
SHARES = (50, 95, 99)
QUIET = ((1,), (1, 3, 1, 5))
"""How many requests come at once in the loads by which service times are measured."""
FASTER = ((25.0, 50.0), (100.0, 50.0))
"""Gbit/s and microseconds of links that are predicted alone."""
BATCH = 1024
SETTINGS = ("rate", "seconds", "quiet_seconds", "rounds", "rows", "dim", "candidates", "pooling", "memory")


def main() -> int:
    """Measure, or write what was measured."""
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.json is not None:
        return report(options.work / "lines.jsonl", options.json)
    why = "the relay was asked for" if options.network == "relay" else can_make_namespaces()
    if why and options.network == "namespaces":
        sys.exit(f"no network namespaces: {why}")
    print(f"links: {'namespaces with tbf, delays by the relay' if not why else f'by the relay ({why})'}")
    options.apart = not why
    same_settings(options)
    with tempfile.TemporaryDirectory() as place:
        options.relay = compiled(Path(place))
        if options.calibrate:
            calibrate(options)
            return 0
        for kind in options.models:
            for count in options.shards:
                part(kind, count, options)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--plans", nargs="+", default=MEASURED, choices=list(PLANS))
    parser.add_argument(
        "--links", nargs="+", default=["1:100", "10:50", "10:200"], help="Gbit/s:microseconds"
    )
    parser.add_argument("--quiet-link", default="10:50", help="over which service times are measured")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a load")
    parser.add_argument(
        "--quiet-seconds", type=float, default=2.0, help="of a load that measures service times"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4_000_000, help="of all tables of a model")
    parser.add_argument(
        "--memory", type=float, default=1.5, help="of a shard, times equal parts; 0: no limit"
    )
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--pooling", type=int, default=10, help="ids of every other feature")
    parser.add_argument("--network", choices=["namespaces", "relay"], help="default: namespaces, if possible")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "recpipe_scale_out"))
    parser.add_argument("--calibrate", action="store_true", help="measure what plan=latency goes by")
    parser.add_argument("--costs", type=Path, help="where that is kept (default: costs.json in --work)")
    parser.add_argument("--json", type=Path, metavar="DIRECTORY", help="write the results of all parts there")
    options = parser.parse_args()
    options.quiet_link = tuple(map(float, options.quiet_link.split(":")))
    options.links = [tuple(map(float, word.split(":"))) for word in options.links]
    options.costs = options.costs or options.work / "costs.json"
    return options


def same_settings(options: argparse.Namespace) -> None:
    """Exit unless what ``--work`` has was measured with these settings."""
    file = options.work / "settings.json"
    own = {key: getattr(options, key) for key in (*SETTINGS, "apart")}
    if not file.exists():
        file.write_text(json.dumps(own) + "\n")
    before = json.loads(file.read_text())
    if own != before:
        changed = ", ".join(f"{key} was {before[key]}" for key in own if own[key] != before[key])
        sys.exit(f"{options.work} has lines of other settings ({changed}): give another --work")


def calibrate(options: argparse.Namespace) -> None:
    """Measure what servers' work takes, on cuts of one shard, and keep it."""
    known = []
    for kind in options.models:
        package = packaged(kind, options.rows, options.dim, options.pooling, options.work)
        asked, network = requests(package, options.candidates, options.pooling), Network(1, options.apart)
        cut_by(package, 1, "capacity", options)
        folder = options.work / "now"
        with network.up(), sharded(options.work / "cut", kind, asked, folder, network, options.relay) as side:
            spans, front_of = quiet_spans(side, options)
        traced = Traced.read(folder / "main.jsonl", [folder / "shard0.jsonl"])
        over = link(*options.quiet_link, BURST if options.apart else 0)
        known.append(Known(traced.within(spans), front_of(traced), 4 * options.dim, options.candidates, over))
    costs = measured_costs(known)
    load = Expected(
        options.rate, options.candidates, options.links[0][0], options.links[0][1], BATCH, os.cpu_count()
    )
    source = f"measured on {os.cpu_count()} cores by benchmarks/scale_out.py --calibrate"
    content = Costs(costs, load, source).content()
    options.costs.write_text(json.dumps(content, indent=1) + "\n")
    for name, value in content["costs"].items():
        if not isinstance(value, list | tuple):
            print(f"{name:16} {value:9.2f}")
    print(f"wrote {options.costs}")


def part(kind: str, count: int, options: argparse.Namespace) -> None:
    """All plans of one model on so many shards."""
    file, key = options.work / "lines.jsonl", "{model} {shards} {plan} {gbit:g}:{delay_us:g}"
    done = (
        {key.format(**json.loads(text)) for text in file.read_text().splitlines()} if file.exists() else set()
    )
    wanted = {
        plan: [
            own
            for own in options.links
            if key.format(model=kind, shards=count, plan=plan, gbit=own[0], delay_us=own[1]) not in done
        ]
        for plan in options.plans
    }
    if not any(wanted.values()):
        return
    if "ours" in options.plans and not options.costs.exists():
        sys.exit(f"{options.costs} is missing: run --calibrate first")
    package = packaged(kind, options.rows, options.dim, options.pooling, options.work)
    asked, network = requests(package, options.candidates, options.pooling), Network(count, options.apart)
    with network.up():
        for plan, links in wanted.items():
            if links:
                began = time.monotonic()
                try:
                    lines = measured(package, count, plan, links, asked, network, options)
                except UncutError as why:
                    print(f"left out: {why}", flush=True)
                    continue
                with file.open("a") as out:
                    out.writelines(json.dumps(line) + "\n" for line in lines)
                for line in lines:
                    _print(line)
                print(f"  {time.monotonic() - began:.0f} s", flush=True)


class UncutError(Exception):
    """A plan that does not fit the shards' memory."""


def cut_by(package: Path, count: int, plan: str, options: argparse.Namespace) -> dict[str, Any]:
    """Cut the package; its plan.json."""
    cut, kind = options.work / "cut", package.name.partition(".")[0]
    shutil.rmtree(cut, ignore_errors=True)
    (options.work / "now").mkdir(exist_ok=True)
    size = sum(file.stat().st_size for file in (package / "tables").iterdir())
    words = [f"memory={int(options.memory * size / count)}"] if options.memory else []
    for word in PLANS[plan]:
        if word == "main=":
            word += str(size // 10)
        elif word == "costs=":
            content = json.loads(options.costs.read_text())
            content["load"]["shared"] = user_features(kind)
            own = options.work / "costs-now.json"
            own.write_text(json.dumps(content))
            word += str(own)
        words.append(word)
    command = [sys.executable, "-m", "recpipe", "shard", str(package), str(cut), f"shards={count}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UncutError(f"{kind} {count} {plan}: {(done.stdout + done.stderr).strip()[-300:]}")
    found: dict[str, Any] = json.loads((cut / "plan.json").read_text())
    return found


def quiet_spans(side: Side, options: argparse.Namespace) -> tuple[list[tuple[float, float]], Any]:
    """Loads that hardly wait: when they were, and what finds a request's seconds outside of batches in a
    trace."""
    if side.links is not None:
        side.links.set(*options.quiet_link)
    loads = [side.regular(options.rate, options.quiet_seconds, groups) for groups in QUIET]
    spans = [(one.began, one.ended) for one in loads]
    alone = float(np.mean(loads[0].load.times))

    def front(traced: Traced) -> float:
        own = traced.within(spans[:1]).batches
        return max(0.0, alone - fmean(batch["end"] - batch["begin"] for batch in own))

    return spans, front


def measured(
    package: Path,
    count: int,
    plan: str,
    links: Sequence[tuple[float, float]],
    asked: list[bytes],
    network: Network,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A line for each link."""
    where, kind, folder = (
        cut_by(package, count, plan, options),
        package.name.partition(".")[0],
        options.work / "now",
    )
    of_link: dict[tuple[float, float], list[Any]] = {own: [] for own in links}
    alone = []
    with (
        single(package, asked, folder, network) as one,
        sharded(options.work / "cut", kind, asked, folder, network, options.relay) as several,
    ):
        one_spans, one_front = quiet_spans(one, options)
        spans, front = quiet_spans(several, options)
        assert isinstance(several.links, Links)
        for number in range(options.rounds):
            alone.append(one.open(options.rate, options.seconds, number))
            for own in links:
                several.links.set(*own)
                of_link[own].append(several.open(options.rate, options.seconds, number))
    most = max(1, BATCH // options.candidates)
    traced = Traced.read(folder / "main.jsonl", [folder / f"shard{at}.jsonl" for at in range(count)])
    lone = Traced.read(folder / "single.jsonl")
    over = link(*options.quiet_link, BURST if network.apart else 0)
    servers = servers_of(traced.within(spans), front(traced), most, over)
    whole = servers_of(lone.within(one_spans), one_front(lone), most, over)
    here = {shard for parts in where["tables"].values() for shard, _, _ in parts} - {count}
    lines = []
    for own in (*links, *FASTER):
        loads = of_link.get(own)
        line: dict[str, Any] = {
            **{"model": kind, "shards": count, "plan": plan, "gbit": own[0], "delay_us": own[1]},
            **{"rate": options.rate, "links": "tbf" if network.apart else "relay", "asked": len(here)},
            "predicted": percentiles(servers, own, options),
        }
        if loads is None:
            lines.append({**line, "measured": None})
            continue
        every = np.concatenate([load.load.times for load in loads])
        lines.append(
            {
                **line,
                "measured": {f"p{share}": 1e3 * float(np.percentile(every, share)) for share in SHARES},
                "rounds": {f"p{share}": [load.load.percentile(share) for load in loads] for share in SHARES},
                "single": {f"p{share}": [load.load.percentile(share) for load in alone] for share in SHARES},
                "single_predicted": percentiles(whole, None, options),
                "cpu_ms": [1e3 * load.cpu for load in loads],
                "cpu_ms_single": [1e3 * load.cpu for load in alone],
                "relay_ms": [1e3 * load.relayed for load in loads],
                "parts_ms": parts_of(traced.within([(load.began, load.ended) for load in loads])),
            }
        )
    return lines


def percentiles(
    servers: Any, own: tuple[float, float] | None, options: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds, by the queueing model, of a load over such links."""
    placed = servers if own is None else replace(servers, link=link(*own, BURST if options.apart else 0))
    rate = min(options.rate, 0.98 * placed.capacity()[0])
    found = simulated(placed, rate)
    return {f"p{share}": 1e3 * found.percentile(share) for share in SHARES}


def _print(line: dict[str, Any]) -> None:
    at = (
        f"{line['model']} {line['shards']} {line['plan']:9} {line['gbit']:5g} Gbit/s {line['delay_us']:3g} us"
    )
    predicted = " ".join(f"{line['predicted'][f'p{share}']:6.2f}" for share in SHARES)
    if line["measured"] is None:
        print(f"{at}  predicted {predicted}")
        return
    found = " ".join(f"{line['measured'][f'p{share}']:6.2f}" for share in SHARES)
    alone = " ".join(f"{np.median(line['single'][f'p{share}']):6.2f}" for share in SHARES)
    cpu = np.median(line["cpu_ms"]), np.median(line["cpu_ms_single"]), np.median(line["relay_ms"])
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in line["parts_ms"].items())
    print(f"{at}  {found}  predicted {predicted}  one server {alone}")
    print(
        f"  CPU ms a request {cpu[0]:.2f}, one server {cpu[1]:.2f}, relay {cpu[2]:.2f}; "
        f"ms of a batch: {parts}"
    )


if __name__ == "__main__":
    sys.exit(main())
