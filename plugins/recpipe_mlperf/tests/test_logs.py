"""Logs of ten real runs, judged by MLPerf's own checkers: they pass, and what is changed in them does not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recpipe_mlperf.benchmarks import BENCHMARKS, Sizes
from recpipe_mlperf.checks import Submission, failing_keys, scaled_rules
from recpipe_mlperf.command import rcp, reference
from recpipe_mlperf.config import QualityConfig
from recpipe_mlperf.task import time_to_quality
from recpipe_mlperf.tests.here import QUIET, SMALL, launched

from recpipe.common.validation import typed
from recpipe.errors import UserError

DCNV2 = (*SMALL, "model=dlrm_dcn", "model.cross_rank=4", "optim=adagrad", "optim.tables.lr=0.1")
DCNV2 = (*DCNV2, "optim.dense.lr=0.1", "+optim.dense.eps=1e-8")


def ran(folder: Path, words: tuple[str, ...], **keys: Any) -> Path:
    config = typed(QualityConfig, {"plugins": [], "every": 0.05, **keys}, "quality")
    time_to_quality(config, folder, words, launch=launched, console=QUIET)
    return folder


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Seeds that reach the target, each of them: of those that a run would draw one in some dozens does not.
    folder = tmp_path_factory.mktemp("logged") / "run"
    return ran(folder, DCNV2, target=0.62, benchmark="dlrm_dcnv2", seeds=[*range(1, 11)])


@pytest.fixture
def run(ten: Path, tmp_path: Path) -> Path:
    """A copy of the ten runs, to be changed."""
    return Path(shutil.copytree(ten, tmp_path / "run"))


def judged(run: Path, rcps: Path | None = None) -> dict[str, list[str]]:
    return {each.name.split()[0] + " scaled" * each.name.endswith("scaled"): [*each.wrong]
            for each in Submission.of(run).judge(rcps)}  # fmt: skip


def changed(run: Path, number: int, change: Callable[[list[str]], list[str]]) -> None:
    file = run / "mlperf" / "0-recipe" / f"result_{number}.txt"
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")


def without(key: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line for line in lines if f'"key": "{key}"' not in line]


def line_of(lines: list[str], key: str, last: bool = False) -> int:
    found = [number for number, line in enumerate(lines) if f'"key": "{key}"' in line]
    return found[-1 if last else 0]


def test_ten_real_runs_pass(ten: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ten.parent / "rcps.json"
    assert rcp(["make", str(ten), f"output={file}"]) == 0
    assert "10 runs; MLPerf asks for 20" in capsys.readouterr().out
    assert rcp(["check", str(ten), f"rcps={file}"]) == 0
    said = capsys.readouterr().out
    assert "fails for eval_accuracy, eval_samples: not comparable with official results" in said
    assert "compliance with 6.0.0, closed, scaled: 10 of 10 logs" in said
    assert said.count("passed") == 5
    assert "RCP found" in said


def test_the_checkers_own_command_says_the_same(ten: Path, tmp_path: Path) -> None:
    log = ten / "mlperf" / "0-recipe" / "result_0.txt"
    config = scaled_rules(tmp_path / "rules", BENCHMARKS["dlrm_dcnv2"], "closed", Submission.of(ten).sizes)
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", "6.0.0", "--werror"]
    command += ["--log_output", str(tmp_path / "output"), str(log)]
    strict = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    scaled = subprocess.run(
        [*command, "--config", str(config)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert strict.returncode == 1
    assert {*re.findall(r"CHECK for '(\w+)'|Failed checks for (\w+)", strict.stderr)} == {
        ("eval_samples", ""),
        ("", "eval_accuracy"),
    }
    assert scaled.returncode == 0
    assert "SUCCESS" in scaled.stderr


def test_open_division_passes_the_rules_as_they_are(ten: Path, tmp_path: Path) -> None:
    log = (ten / "mlperf" / "0-recipe" / "result_0.txt").read_text()
    file = tmp_path / "result_0.txt"
    file.write_text(log.replace('"value": "closed"', '"value": "open"'))
    assert failing_keys(file, "6.0.0") == []
    sizes = Submission.of(ten).sizes
    assert scaled_rules(tmp_path / "rules", BENCHMARKS["dlrm_dcnv2"], "open", sizes) is None


@pytest.mark.parametrize(
    ("benchmark", "division", "differ"),
    [("dlrm_dcnv2", "closed", 2), ("dlrmv4", "closed", 10), ("dlrmv4", "open", 5)],
)
def test_copies_of_the_rules_differ_in_numbers_alone(
    tmp_path: Path, benchmark: str, division: str, differ: int
) -> None:
    from mlperf_logging import compliance_checker

    rules = BENCHMARKS[benchmark]
    config = scaled_rules(tmp_path, rules, division, Sizes(4800, 1200, 0.625))
    assert config == tmp_path / "common.yaml"
    originals = Path(str(compliance_checker.__file__)).parent / f"training_{rules.ruleset}"
    lines = 0
    for copy in tmp_path.iterdir():
        mine, theirs = (file.read_text().splitlines() for file in (copy, originals / copy.name))
        assert len(mine) == len(theirs)
        for new, old in zip(mine, theirs, strict=True):
            if new == old:
                continue
            if "enqueue_config" in old:
                assert new == old.replace(f"training_{rules.ruleset}/", f"{tmp_path}/")
                continue
            lines += 1
            number = r"\d[\d.]*(?:e-\d+)?"
            assert re.sub(number, "#", new) == re.sub(number, "#", old)
    assert lines == differ


def test_the_log_has_the_times_of_the_run(ten: Path) -> None:
    told = json.loads((ten / "time_to_quality.json").read_text())["rows"][0]["runs"][3]
    lines = (ten / "mlperf" / "0-recipe" / "result_3.txt").read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert [event["time_ms"] for event in events] == sorted(event["time_ms"] for event in events)
    at = {event["key"]: event["time_ms"] for event in events}
    assert at["run_stop"] - at["run_start"] == pytest.approx(1000 * told["seconds"], abs=1.1)
    assert at["init_stop"] - at["init_start"] == pytest.approx(1000 * told["set_up_seconds"], abs=1.1)
    values = [event["value"] for event in events if event["key"] == "eval_accuracy"]
    assert values == [each["value"] for each in told["evaluations"]]
    seed = next(event for event in events if event["key"] == "seed")
    assert seed["value"] == told["seed"]
    assert seed["metadata"]["file"] == "recpipe_mlperf/log.py"


# -- each fault is rejected ----------------------------------------------------------------------


def test_a_repeated_seed(run: Path) -> None:
    seeds = json.loads((run / "time_to_quality.json").read_text())["seeds"]
    changed(
        run, 7, lambda lines: [line.replace(f'"value": {seeds[7]}', f'"value": {seeds[2]}') for line in lines]
    )
    wrong = judged(run)
    (fault,) = wrong.pop("seeds")
    assert f"logs seed {seeds[2]}" in fault
    assert not any(wrong.values())


def test_a_wrong_cadence(run: Path) -> None:
    changed(run, 4, lambda lines: [line.replace('"epoch_num": 0.05', '"epoch_num": 0.06') for line in lines])
    wrong = judged(run)
    assert wrong.pop("course") == ["result_4.txt: evaluation 1 is at epoch_num 0.06, not 0.05"]
    assert not any(wrong.values())


def test_an_early_stop(run: Path) -> None:
    """The last evaluations are cut off, and the run says that it was a success."""

    def early(lines: list[str]) -> list[str]:
        last = line_of(lines, "eval_accuracy", last=True)
        value = json.loads(lines[last].removeprefix(":::MLLOG "))["value"]
        return [*lines[:last], lines[last].replace(str(value), "0.61"), *lines[last + 1 :]]

    for number in (1, 2):
        changed(run, number, early)
    wrong = judged(run)
    assert wrong["compliance scaled"] == ["result_1.txt: eval_accuracy", "result_2.txt: eval_accuracy"]
    assert wrong["course"][0] == "result_1.txt: it ended with 'success' at 0.61; the target is 0.62"


def test_one_run_that_misses_the_target_is_dropped_and_two_are_not(run: Path, ten: Path) -> None:
    def missed(lines: list[str]) -> list[str]:
        last = line_of(lines, "eval_accuracy", last=True)
        return [line.replace('"success"', '"aborted"') for line in lines[:last] + lines[last + 1 :]]

    rcps = ten.parent / "made.json"
    rcps.write_text(json.dumps(reference([Submission.of(ten)])))
    numbers = [
        number
        for number in range(10)
        if (run / "mlperf" / "0-recipe" / f"result_{number}.txt").read_text().count('"eval_accuracy"') > 1
    ]
    changed(run, numbers[0], missed)
    assert not any(judged(run, rcps).values())
    changed(run, numbers[1], missed)
    wrong = judged(run, rcps)
    assert len(wrong["compliance scaled"]) == 2
    assert wrong["convergence"] == ["Insufficient convergence"]


@pytest.mark.parametrize(
    "key", ["global_batch_size", "opt_adagrad_epsilon", "eval_samples", "run_stop", "seed"]
)
def test_a_missing_key(run: Path, key: str) -> None:
    changed(run, 5, without(key))
    wrong = judged(run)
    if key == "seed":
        assert "result_5.txt logs no seed" in " ".join(wrong["seeds"])
    else:
        assert wrong["compliance scaled"] == [f"result_5.txt: {key}"]


def test_nine_runs(run: Path) -> None:
    (run / "mlperf" / "0-recipe" / "result_9.txt").unlink()
    assert judged(run)["course"] == ["9 runs, not 10"]


def test_runs_that_converge_too_fast_for_the_reference(run: Path, ten: Path, tmp_path: Path) -> None:
    made = reference([Submission.of(ten)])
    (record,) = made.values()
    record["Epochs to converge"] = [2 * each for each in record["Epochs to converge"]]
    rcps = tmp_path / "slow.json"
    rcps.write_text(json.dumps(made))
    assert judged(run, rcps)["convergence"] == ["RCP found"]


def test_another_optimizer_is_told_and_rejected(tmp_path: Path) -> None:
    words = (*DCNV2, "optim.dense.name=SGD", "~optim.dense.eps")
    run = ran(tmp_path, words, target=0.5, benchmark="dlrm_dcnv2", runs=1)
    (wrong, *_) = judged(run)["compliance scaled"]
    assert "opt_name" in wrong
    assert '"value": "adagrad+sgd"' in (run / "mlperf" / "0-recipe" / "result_0.txt").read_text()


# -- what cannot be ------------------------------------------------------------------------------


def test_refused(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def says(text: str, *words: str) -> None:
        with pytest.raises(UserError, match=re.escape(text)) as told:
            rcp(words)
        assert "\n" not in str(told.value)

    says("say recpipe rcp make RUN", "tell", str(ten))
    says("say where, output=FILE", "make", str(ten))
    says("recpipe rcp check takes rcps and row, not 'rcp'", "check", str(ten), "rcp=x")
    says("is no run of task=time_to_quality: there is no time_to_quality.json", "check", str(tmp_path))
    (tmp_path / "time_to_quality.json").write_text("{")
    says("time_to_quality.json: not what task=time_to_quality leaves", "check", str(tmp_path))
    says("rcps=", "check", str(ten), f"rcps={tmp_path / 'none.json'}")
    says("has no row 'x'; there are recipe", "check", str(ten), "row=x")
    with pytest.raises(UserError, match="quality.every=100: the rules of dlrm_dcnv2 take a share"):
        ran(tmp_path / "share", DCNV2, target=0.6, benchmark="dlrm_dcnv2", every=100)
    monkeypatch.setitem(sys.modules, "mlperf_logging", None)
    with pytest.raises(
        UserError, match=re.escape("need the package mlperf-logging: pip install 'recpipe[mlperf]'")
    ):
        ran(tmp_path / "missing", DCNV2, target=0.6, benchmark="dlrm_dcnv2")
