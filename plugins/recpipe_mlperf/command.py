"""``recpipe rcp``: references of convergence made of recpipe's own runs, and logs judged by MLPerf's
checkers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recpipe.common.files import unwritable
from recpipe.errors import UserError, shown
from recpipe_mlperf.benchmarks import PRECISIONS
from recpipe_mlperf.checks import Logged, Submission, quietly
from recpipe_mlperf.log import installed
from recpipe_mlperf.score import LEAST, OFFICIAL

USAGE = "say recpipe rcp make RUN [RUN ...] output=FILE, or recpipe rcp check RUN [rcps=FILE]"


def rcp(words: Sequence[str]) -> int:
    """``make RUN ... output=FILE``, ``check RUN [rcps=FILE]``, both with ``row=NAME``; returns 0, and 1 if a
    check rejects the logs."""
    verb, *rest = words
    known = {"make": ("output", "row"), "check": ("rcps", "row")}.get(verb)
    if known is None:
        raise UserError(f"{USAGE}, not 'recpipe rcp {shown(verb)}'")
    options: dict[str, str] = {}
    runs = []
    for word in rest:
        key, equals, value = word.partition("=")
        if equals and not Path(word).exists():
            if key not in known:
                raise UserError(f"recpipe rcp {verb} takes {' and '.join(known)}, not '{shown(key)}'")
            options[key] = value
        else:
            runs.append(Path(word).expanduser())
    if not runs:
        raise UserError(USAGE)
    row = options.get("row")
    if verb == "make":
        if "output" not in options:
            raise UserError("recpipe rcp make writes a reference: say where, output=FILE")
        return _make([Submission.of(run, row) for run in runs], Path(options["output"]).expanduser())
    if len(runs) > 1:
        raise UserError(f"recpipe rcp check takes one run, not {len(runs)}")
    reference = options.get("rcps")
    return _check(Submission.of(runs[0], row), Path(reference).expanduser() if reference else None)


def _make(submissions: Sequence[Submission], target: Path) -> int:
    """Write the reference of all runs, one record for each batch size."""
    made = reference(submissions)
    try:
        target.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    except OSError as fault:
        raise unwritable(target, fault) from fault
    for name, record in made.items():
        runs = len(record["Epochs to converge"])
        few = f"; MLPerf asks for {2 * OFFICIAL}" if runs < 2 * OFFICIAL else ""
        print(f"{name}: {runs} runs{few}")
    print(f"wrote {target}")
    return 0


def reference(submissions: Sequence[Submission]) -> dict[str, dict[str, Any]]:
    """The records of reference convergence points, by name, in the form that MLPerf's checker reads:
    ``Epochs to converge`` are epochs of ``dlrm_dcnv2`` and samples of ``dlrmv4``.

    ``UserError`` for runs of several benchmarks, for one that has not converged, and for fewer than three.
    """
    with installed():
        from mlperf_logging.rcp_checker import rcp_checker

    names = dict.fromkeys(each.benchmark.name for each in submissions)
    if len(names) > 1:
        raise UserError(f"a reference is of one benchmark, not of {' and '.join(names)}")
    made: dict[str, dict[str, Any]] = {}
    for each in submissions:
        benchmark, about = each.benchmark, each.about
        for file in each.files():
            with quietly():
                missed, place, batch, _ = rcp_checker.read_submission_file(
                    str(file), benchmark.ruleset, False
                )
            if missed:
                raise UserError(f"{file}: this run has not reached its target; a reference has none such")
            log = Logged.read(file, benchmark.ruleset)
            record = made.setdefault(
                f"{benchmark.name}_ref_{batch}",
                {
                    "Benchmark": benchmark.name,
                    "Creator": about["organisation"],
                    "When": datetime.now(UTC).date().isoformat(),
                    "Platform": about["platform"],
                    "Precision": PRECISIONS.get(about["precision"], about["precision"]).upper(),
                    "BS": batch,
                    "Hyperparams": {key: value for key, value, _ in log.lines if key.startswith("opt_")},
                    "Epochs to converge": [],
                },
            )
            record["Epochs to converge"].append(place)
    for name, record in made.items():
        if len(record["Epochs to converge"]) < LEAST:
            raise UserError(f"{name}: a reference needs {LEAST} runs at least")
    return made


def _check(submission: Submission, rcps: Path | None) -> int:
    """Print what each check says."""
    verdicts = submission.judge(rcps)
    for verdict in verdicts:
        print(f"{'REJECTED' if verdict.wrong else 'passed  '}  {verdict.name}", end="")
        print(f": {verdict.says}" if verdict.says else "")
        for fault in verdict.wrong:
            print(f"          {fault}")
    if rcps is None:
        print("convergence is not judged: give a reference, rcps=FILE, of recpipe rcp make")
    return int(any(verdict.wrong for verdict in verdicts))
