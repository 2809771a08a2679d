"""A folder of logs judged: by MLPerf's compliance checker, seed checker and checker of convergence, and by
the rules that none of them looks at."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recpipe.errors import UserError, shown
from recpipe_mlperf.benchmarks import BENCHMARKS, Benchmark, Sizes
from recpipe_mlperf.log import installed
from recpipe_mlperf.score import OFFICIAL

USAGE = "training"
CONVERGENCE = "eval_accuracy"
"""The key that alone is wrong with a run that has not reached the target."""
CADENCE = 0.05
"""Of an epoch from evaluation to evaluation of ``dlrm_dcnv2``."""


class _Messages(logging.Handler):
    """Keeps the errors that it is told."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one, on a single line."""
        self.told.append(" ".join(record.getMessage().split()))


@contextmanager
def quietly() -> Iterator[list[str]]:
    """Keep what the checkers tell Python's root logger off the screen; gives the errors among it."""
    root, messages = logging.getLogger(), _Messages()
    before = root.handlers[:]
    root.handlers[:] = [messages]
    try:
        yield messages.told
    finally:
        root.handlers[:] = before


@dataclass(frozen=True)
class Logged:
    """A log as MLPerf's parser reads it: each line's key, value and metadata."""

    file: Path
    lines: Sequence[tuple[str, Any, dict[str, Any]]]

    @classmethod
    def read(cls, file: Path, ruleset: str) -> Logged:
        """``UserError`` for a file that has lines which cannot be read, or none."""
        with installed():
            from mlperf_logging.compliance_checker import mlp_parser

        lines, errors = mlp_parser.parse_file(str(file), ruleset=ruleset)
        if errors or not lines:
            what = errors[0][1] if errors else "it has no line of MLPerf's"
            raise UserError(f"{file}: no log of MLPerf's ({what})")
        return cls(file, [(line.key, line.value["value"], line.value["metadata"]) for line in lines])

    def values(self, key: str) -> list[Any]:
        """All values of a key."""
        return [value for name, value, _ in self.lines if name == key]

    def one(self, key: str) -> Any:
        """The first value of a key; None if it has none."""
        return next(iter(self.values(key)), None)


@dataclass(frozen=True)
class Verdict:
    """What one check says: ``wrong``, a line for each fault; none: it passes."""

    name: str
    wrong: Sequence[str]
    says: str = ""


def failing_keys(file: Path, ruleset: str, config: Path | None = None) -> list[str]:
    """The keys for which MLPerf's compliance checker rejects a log, by its own rules or those of ``config``;
    empty: it passes."""
    with installed():
        from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker(USAGE, ruleset, quiet=False, werror=False)
    with quietly():
        passed = checker.check_file(str(file), str(config or f"{USAGE}_{ruleset}/common.yaml"))
    keys = {*checker.overwritable}
    for message in checker.not_overwritable:
        first = message.split("\n")[0]
        named = re.match(r"Failed checks for (\w+)", first)
        keys |= {named[1]} if named else {*re.findall(r"'(\w+)'", first)} or {first}
    assert passed == (not keys), "it fails for what it has messages of"
    return sorted(keys)


def scaled_rules(folder: Path, benchmark: Benchmark, division: str, sizes: Sizes) -> Path | None:
    """Copy the rules of the installed mlperf-logging into ``folder`` with the numbers of a smaller run, and
    return the file for ``--config``; None where the rules have no such number.

    The copies differ from the originals in the lines of ``benchmark.changes`` and in where they look for each
    other. ``UserError`` if the installed rules are others.
    """
    changes = benchmark.changes(division, sizes)
    if not changes:
        return None
    with installed():
        from mlperf_logging import compliance_checker
    own = f"{USAGE}_{benchmark.ruleset}"
    rules = Path(str(compliance_checker.__file__)).parent / own
    special = f"{division}_{benchmark.name}.yaml"
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("common.yaml", f"{division}_common.yaml", special):
        try:
            text = (rules / name).read_text(encoding="utf-8")
        except OSError as fault:
            raise UserError(
                f"the installed mlperf-logging has no rules {benchmark.ruleset} for {benchmark.name} "
                f"({fault}): pip install 'recpipe[mlperf]'"
            ) from fault
        for change in changes if name == special else ():
            if text.count(change.old) != 1:
                raise UserError(
                    f"{rules / name}: '{change.old}' is there {text.count(change.old)} times, not once: this "
                    "mlperf-logging has other rules than those that recpipe knows"
                )
            text = text.replace(change.old, change.new)
        text = text.replace(f"enqueue_config('{own}/", f"enqueue_config('{folder}/")
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "common.yaml"


def _compliance(name: str, logs: Sequence[Logged], ruleset: str, config: Path | None) -> Verdict:
    """One log may fail, for its figure alone: its run, the slowest, has not reached the target."""
    failing = {log.file.name: failing_keys(log.file, ruleset, config) for log in logs}
    missed = [file for file, keys in failing.items() if keys == [CONVERGENCE]]
    wrong = [
        f"{file}: {', '.join(keys)}"
        for file, keys in failing.items()
        if keys and (file not in missed or len(missed) > 1)
    ]
    return Verdict(name, wrong, f"{sum(not keys for keys in failing.values())} of {len(logs)} logs")


def _seeds(logs: Sequence[Logged], ruleset: str) -> Verdict:
    with installed():
        from mlperf_logging.package_checker.seed_checker import SeedChecker

    with quietly() as errors:
        passed = SeedChecker(ruleset).check_seeds([str(log.file) for log in logs])
    return Verdict("seeds", [] if passed else errors)


def _course(logs: Sequence[Logged], benchmark: Benchmark, target: float) -> Verdict:
    """What no checker looks at, in each division: how many runs, evaluations at the fixed places and nowhere
    else, and an end at the first that reaches the target, or after all training samples."""
    wrong = [] if len(logs) == OFFICIAL else [f"{len(logs)} runs, not {OFFICIAL}"]
    for log in logs:
        places = [meta.get(benchmark.unit) for key, _, meta in log.lines if key == CONVERGENCE]
        values = log.values(CONVERGENCE)
        if fault := _off_cadence(log, places, benchmark):
            wrong.append(f"{log.file.name}: {fault}")
        reached = [value is not None and value >= target for value in values]
        status = next((meta.get("status") for key, _, meta in log.lines if key == "run_stop"), None)
        if any(reached[:-1]):
            wrong.append(f"{log.file.name}: it went on after {target:g} was reached")
        elif (status == "success") != any(reached):
            last = values[-1] if values else None
            wrong.append(f"{log.file.name}: it ended with '{status}' at {last}; the target is {target:g}")
    return Verdict("course of runs", wrong)


def _off_cadence(log: Logged, places: Sequence[Any], benchmark: Benchmark) -> str | None:
    if benchmark.unit == "epoch_num":
        between: float = CADENCE
    else:
        samples, batch, every = map(log.one, ("train_samples", "global_batch_size", "eval_every_data_pct"))
        if None in (samples, batch, every):
            return "train_samples, global_batch_size or eval_every_data_pct is missing"
        between = benchmark.steps(every, samples, batch) * batch
    for number, place in enumerate(places, 1):
        if place is None or abs(place - number * between) > 1e-6:
            return f"evaluation {number} is at {benchmark.unit} {place}, not {number * between:g}"
    return None


def _convergence(folder: Path, ruleset: str, reference: Path) -> Verdict:
    """MLPerf's checker of convergence, with a reference of the user's own."""
    with installed():
        from mlperf_logging.rcp_checker import rcp_checker

    try:
        with reference.open(encoding="utf-8") as file, quietly():
            passed, says, factor = rcp_checker.check_directory(
                str(folder), USAGE, ruleset, False, False, rcp_file=file, rcp_pass="pruned_rcps"
            )
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise UserError(
            f"rcps={reference}: no reference as recpipe rcp make writes it ({fault!r})"
        ) from fault
    says = f"{says}, times are multiplied by {factor:.4f}" if passed and factor != 1 else says
    return Verdict("convergence", [] if passed else [says], says)


@dataclass(frozen=True)
class Submission:
    """The logs of one row of a time_to_quality run, and what they are of."""

    folder: Path
    benchmark: Benchmark
    division: str
    sizes: Sizes
    about: Mapping[str, Any]
    """``mlperf`` of the row in time_to_quality.json."""

    @classmethod
    def of(cls, run: Path, row: str | None = None) -> Submission:
        """The logs of a ``row`` of the run in ``run``, None: its only one; ``UserError`` if there are
        none."""
        file = run / "time_to_quality.json"
        if not file.is_file():
            raise UserError(f"{run} is no run of task=time_to_quality: there is no {file.name} in it")
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            rows = {each["name"]: each.get("mlperf") for each in told["rows"]}
        except (OSError, ValueError, KeyError, TypeError) as fault:
            raise UserError(f"{file}: not what task=time_to_quality leaves ({fault})") from fault
        if row is None and len(rows) > 1:
            raise UserError(f"{run} has several rows, {', '.join(rows)}: say row=NAME")
        name = next(iter(rows)) if row is None else row
        if name not in rows:
            raise UserError(f"{run} has no row '{shown(name)}'; there are {', '.join(rows)}")
        about = rows[name]
        if about is None:
            raise UserError(
                f"{run}: its runs have no logs of MLPerf's; run task=time_to_quality with quality.benchmark="
                f"{' or '.join(BENCHMARKS)}"
            )
        sizes = Sizes(told["train_samples"], told["eval_samples"], told["target"])
        return cls(run / about["logs"], BENCHMARKS[about["benchmark"]], about["division"], sizes, about)

    def files(self) -> list[Path]:
        """The logs, in the order of runs; ``UserError`` if there are none."""
        found = sorted(self.folder.glob("result_*.txt"), key=lambda file: (len(file.name), file.name))
        if not found:
            raise UserError(f"{self.folder}: no result_*.txt, the logs of runs, in it")
        return found

    def judge(self, reference: Path | None = None) -> list[Verdict]:
        """All checks; ``reference``: what ``recpipe rcp make`` has written, None: without convergence."""
        benchmark, division, ruleset = self.benchmark, self.division, self.benchmark.ruleset
        logs = [Logged.read(file, ruleset) for file in self.files()]
        config = scaled_rules(self.folder / "rules", benchmark, division, self.sizes)
        rules = f"compliance with {ruleset}, {division}"
        verdicts = [_compliance(rules, logs, ruleset, None)]
        if config is not None:
            verdicts.append(_compliance(f"{rules}, scaled", logs, ruleset, config))
            failing = {key for log in logs for key in failing_keys(log.file, ruleset)}
            changes = benchmark.changes(division, self.sizes)
            if failing and failing <= {key for change in changes for key in change.keys}:
                # What a smaller run cannot have; the copy of the rules judges these as well.
                told = f"fails for {', '.join(sorted(failing))}: not comparable with official results"
                verdicts[0] = Verdict(rules, [], told)
        verdicts += [_seeds(logs, ruleset), _course(logs, benchmark, self.sizes.target)]
        if reference is not None:
            verdicts.append(_convergence(self.folder, ruleset, reference))
        return verdicts
