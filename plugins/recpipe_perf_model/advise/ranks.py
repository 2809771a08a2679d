"""What another rank would bring: on the same machine, or on one more like it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from recpipe.distributed.ranks import Emulation
from recpipe.errors import UserError
from recpipe_perf_model.advise.candidates import Candidate, candidates
from recpipe_perf_model.facts.facts import Facts

NETWORK = Emulation(latency_us=100.0, gbit_per_s=10.0)
"""Between machines, if ``advise.network`` names no other."""
Seconds = Callable[[Candidate, Facts, Emulation | None], float]
"""Predicts a recipe's step over the ranks of its facts."""


def threads_of_rank(threads: int, apart: bool) -> int:
    """The threads of one of several ranks, where a run of one process has ``threads``: torchrun gives each of
    those that share a machine one thread, unless OMP_NUM_THREADS says how many."""
    said = os.environ.get("OMP_NUM_THREADS", "1")
    return threads if apart else min(threads, int(said) if said.isdigit() and int(said) else 1)


def another_rank(
    facts: Facts, network: Emulation | None, seconds: Seconds, now: float
) -> list[dict[str, Any]]:
    """How many times as fast the best exact recipe of two ranks is as a step of ``now`` seconds: with the
    memory of ``facts`` shared by both on this machine, and with as much on each of two machines. Empty if the
    machine's profile lacks messages between ranks."""
    network = network or NETWORK
    wire = f"{network.latency_us:g} us" if network.latency_us else "no latency"
    wire += f" and {network.gbit_per_s:g} Gbit/s" if network.gbit_per_s else ""
    two = facts.at(trainers=2)
    whole = facts.share >= 1
    places = {
        "2 ranks on this machine": (two if whole else two.at(share=facts.share / 2), None),
        f"one more machine like this, {wire} away": (two, network),
    }
    found = []
    for what, (over, between) in places.items():
        times: dict[str, float] = {}
        for candidate in candidates(over, {}):
            if candidate.alters:
                continue
            try:
                times[candidate.name] = seconds(candidate, over, between)
            except UserError:
                continue
        if times:
            best = min(times, key=lambda name: times[name])
            found.append({"what": f"{what} ({best})", "ratio": now / times[best]})
    return found
