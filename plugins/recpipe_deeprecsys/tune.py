"""``recpipe serve PACKAGE 'tune=p95<25ms'``: the search through HTTP, for the words of a server."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from recpipe.answers.score import DIGEST
from recpipe.common.console import log
from recpipe.common.files import unwritable
from recpipe.errors import UserError, shown
from recpipe_deeprecsys.command import fitting, measure
from recpipe_deeprecsys.config import PERCENTILES, BenchOptions
from recpipe_deeprecsys.load import fewest, require_loadgen

_WANTED = re.compile(r"p(\d+(?:\.\d+)?)<(\d+(?:\.\d+)?)ms")
WORDS = ("workers", "threads", "batch", "wait_ms")
"""What is searched for."""
SECONDS, TOLERANCE, TIMES = 1.0, 0.1, 2
"""Of each run, and between a rate that is valid and one that is not; and how many times as many requests a
run has as LoadGen asks for if none is late: that a server starts should not take long."""


def tuned(package: Path, wanted: str, workers: int, threads: int) -> dict[str, Any]:
    """The ``WORDS`` by which a server of ``package`` answers most requests within ``wanted`` (``p95<25ms``),
    of at most ``workers`` processes, or of as many as there are cores if that is 1, with ``threads`` each or
    as many as leave no core without work.

    They are written beside the package, and read from there for the same package, bound and cores.
    ``UserError`` if no rate is within the bound."""
    options = wanted_of(wanted, workers, threads)
    place = package.with_name(f"{package.name}.tuned.json")
    about = {
        "tune": wanted,
        "package": _digest(package),
        "cores": len(os.sched_getaffinity(0)),
        "most_workers": options.workers,
        "threads": threads,
    }
    if (known := _known(place, about)) is not None:
        log.info("%s as %s says: %s", wanted, place, _told(known))
        return known
    require_loadgen()
    with tempfile.TemporaryDirectory(prefix="recpipe-tune-") as folder:
        report = measure(package, options, (), Path(folder))
    if report["best"] is None:
        raise UserError(f"tune={wanted}: {report['why']}")
    found = {name: report["batching"][name] for name in WORDS}
    said = {**about, "words": found, "requests_per_second": report["best"]["rate"], "report": report}
    try:
        place.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    except OSError as fault:
        raise unwritable(place, fault, "put the package into a directory that can be written to") from fault
    log.info("%s: %.1f requests/s with %s; wrote %s", wanted, report["best"]["rate"], _told(found), place)
    return found


def wanted_of(wanted: str, workers: int, threads: int) -> BenchOptions:
    """The options of the search; ``UserError`` for words that say no bound."""
    found = _WANTED.fullmatch(wanted.replace(" ", ""))
    if found is None or f"{float(found[1]):g}" not in PERCENTILES or float(found[2]) <= 0:
        raise UserError(
            f"tune={shown(wanted)}: say a percentile and a bound, as in 'tune=p95<25ms'; percentiles are "
            f"{', '.join(PERCENTILES)}"
        )
    return fitting(
        BenchOptions(
            bound_ms=float(found[2]),
            percentile=float(found[1]),
            workers=workers if workers > 1 else 0,
            threads=threads,
            search=True,
            http=True,
            seconds=SECONDS,
            queries=TIMES * fewest(float(found[1])),
            tolerance=TOLERANCE,
        )
    )


def _digest(package: Path) -> str:
    """That of the package's manifest; ``UserError`` if there is none."""
    try:
        return hashlib.sha256((package / DIGEST).read_bytes()).hexdigest()[:12]
    except OSError as fault:
        raise UserError(f"{package}: {fault.strerror}; make a package with 'recpipe package'") from fault


def _known(place: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """What was found before for the same; None: nothing."""
    try:
        said = json.loads(place.read_text(encoding="utf-8"))
        words = said["words"]
        same = all(said[key] == value for key, value in about.items()) and {*words} == {*WORDS}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return dict(words) if same else None


def _told(words: dict[str, Any]) -> str:
    return " ".join(f"{name}={words[name]:g}" for name in WORDS)
