"""task=time_to_quality: the clock of a run, means by MLPerf's rules, rows beside each other, and what it
refuses."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from recpipe_mlperf.clock import Evaluation, Timed, reaches
from recpipe_mlperf.config import QualityConfig
from recpipe_mlperf.score import LEAST, Outcome, olympic, summary
from recpipe_mlperf.task import time_to_quality
from recpipe_mlperf.tests.here import QUIET, SMALL, launched

from recpipe.common.validation import typed
from recpipe.config.compose import compose
from recpipe.data.config import SyntheticConfig
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from recpipe.run import run


def measured(folder: Path, *words: str, rows: list[str] | None = None, **keys: Any) -> dict[str, Any]:
    config = typed(QualityConfig, {"plugins": rows or [], **keys}, "quality")
    return time_to_quality(config, folder, [*SMALL, *words], launch=launched, console=QUIET)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two rows, which differ in their learning rate alone, three runs each."""
    folder = tmp_path_factory.mktemp("quality")
    rows = ["resident", "resident:optim.tables.lr=0.02:optim.dense.lr=0.02"]
    return measured(folder, rows=rows, target=0.62, every=320, seeds=[5, 6, 7]), folder


def test_runs_end_with_the_evaluation_that_reaches_the_target(told: Any) -> None:
    content, folder = told
    assert json.loads((folder / "time_to_quality.json").read_text()) == content
    assert content["seeds"] == [5, 6, 7]
    for row in content["rows"]:
        assert [each["seed"] for each in row["runs"]] == [5, 6, 7]
        for each in row["runs"]:
            report = json.loads((folder / each["run"] / "report.json").read_text())
            *before, last = each["evaluations"]
            assert each["status"] == "success"
            assert last["value"] >= 0.62 > max([e["value"] for e in before], default=0.0)
            assert [e["samples"] for e in each["evaluations"]] == [
                320 * (n + 1) for n in range(len(before) + 1)
            ]
            assert [p["samples"] for p in report["history"]] == [e["samples"] for e in each["evaluations"]]
            assert report["recipe"]["seed"] == each["seed"]
            assert report["data"]["train_samples"] == last["samples"] == each["samples"]


def test_time_has_evaluations_in_it_and_not_what_comes_before(told: Any) -> None:
    content, folder = told
    for each in content["rows"][0]["runs"]:
        timed = Timed.read(folder / each["run"])
        assert 0 < timed.first_step < timed.evaluations[0].start
        assert all(later.start > early.stop for early, later in pairwise(timed.evaluations))
        assert each["seconds"] == timed.evaluations[-1].stop
        evaluating = sum(e.stop - e.start for e in timed.evaluations)
        assert 0 < each["evaluation_seconds"] == evaluating < each["seconds"]
        assert each["set_up_seconds"] > 0


def test_a_rate_that_learns_slower_takes_more_samples(told: Any) -> None:
    fast, slow = told[0]["rows"]
    assert fast["samples_ratio"] == 1
    assert fast["samples_ratio_interval"] is None
    assert slow["samples_ratio"] == slow["samples"]["olympic_mean"] / fast["samples"]["olympic_mean"] > 1.5
    low, high = slow["samples_ratio_interval"]
    assert 1 < low <= high


def test_generated_data_are_the_same_for_all_seeds(told: Any) -> None:
    content, folder = told
    runs = [each["run"] for row in content["rows"] for each in row["runs"]]
    reports = [json.loads((folder / each / "report.json").read_text()) for each in runs]
    assert {report["recipe"]["data"]["seed"] for report in reports} == {1}
    assert len({report["recipe"]["seed"] for report in reports}) == 3
    alike = [open_dataset(SyntheticConfig(samples=100, seed=1), seed).fingerprint for seed in (1, 2)]
    apart = [open_dataset(SyntheticConfig(samples=100), seed).fingerprint for seed in (1, 2)]
    assert alike[0] == alike[1] == apart[0] != apart[1]


def test_the_page_names_every_run(told: Any) -> None:
    page = (told[1] / "time_to_quality.html").read_text()
    assert page.count("success") == 6
    assert "<svg" in page


def test_a_target_that_is_never_reached(tmp_path: Path) -> None:
    says = r"^quality.target=0.999: no run reached it, the best auc was 0\.\d+; give a target that is nearer"
    with pytest.raises(UserError, match=says):
        measured(tmp_path, target=0.999, every=0.25, runs=1)
    content = json.loads((tmp_path / "time_to_quality.json").read_text())
    (row,) = content["rows"]
    assert row["converged"] == 0
    assert row["samples"]["olympic_mean"] is None
    # Of 4,800 samples the fourth evaluation is after 4 * 18 * 64; that after the last step does not count.
    (only,) = row["runs"]
    assert only["status"] == "aborted"
    assert [each["samples"] for each in only["evaluations"]] == [1152, 2304, 3456, 4608]


def test_plugin_of_the_command_line(tmp_path: Path) -> None:
    content = measured(tmp_path, "+plugin=slipstream", "task=time_to_quality", target=0.5, every=0.5, runs=1)
    (row,) = content["rows"]
    assert row["name"] == "recipe"
    assert "SAMPLE_SET" in row["altered"]


def test_callbacks_of_the_recipe_stay(tmp_path: Path) -> None:
    own = "trainer.callbacks=[{_target_: lightning.pytorch.callbacks.LambdaCallback}]"
    measured(tmp_path, own, target=0.5, every=0.5, runs=1)
    (folder,) = tmp_path.glob("runs/run-*")
    recipe = json.loads((folder / "report.json").read_text())["recipe"]
    names = [each["_target_"] for each in recipe["trainer"]["callbacks"]]
    assert names == ["lightning.pytorch.callbacks.LambdaCallback", "recpipe_mlperf.Clock"]


def test_a_timed_run_is_the_run_without_a_clock(tmp_path: Path) -> None:
    """Up to where it stops: the same losses and figures."""
    measured(tmp_path / "timed", target=0.62, every=320, seeds=[5])
    (folder,) = (tmp_path / "timed").glob("runs/run-*")
    timed = json.loads((folder / "report.json").read_text())["history"]
    words = [*SMALL, "seed=5", "data.seed=1", "trainer.eval_every=5", "task.page=false"]
    plain = run(compose(words), tmp_path / "plain")
    assert len(timed) < len(plain["history"])
    for mine, other in zip(timed, plain["history"], strict=False):
        assert {k: mine[k] for k in ("step", "loss", "auc")} == {k: other[k] for k in ("step", "loss", "auc")}


# -- means ---------------------------------------------------------------------------------------


def outcome(seed: int, samples: int, status: Any = "success", seconds: float = 1.0) -> Outcome:
    timed = Timed(0.0, 0.1, seconds, status, 0.5, [Evaluation(1, samples, 0.7, 0.2, seconds)])
    return Outcome(seed, timed, {"throughput": {"set_up_seconds": 3.0, "samples_per_second": 10.0}}, "run")


def test_olympic_mean() -> None:
    assert olympic([9.0, 1.0, 2.0, 3.0]) == 2.5
    assert olympic([9.0, math.inf, 2.0, 3.0]) == 6.0
    assert olympic([math.inf, math.inf, 2.0, 3.0]) is None
    assert olympic([1.0] * (LEAST - 1)) is None
    # The example of the rules' appendix: 16, 14, 16, 17, 16, 16, 15, 16, 15, 16 epochs.
    assert olympic([16, 14, 16, 17, 16, 16, 15, 16, 15, 16]) == 15.75


def test_one_run_may_miss_the_target_and_two_may_not() -> None:
    first = [outcome(seed, 100 + seed) for seed in range(5)]
    one = [outcome(seed, 200 + 2 * seed, "aborted" if seed == 0 else "success") for seed in range(5)]
    row = summary("b", one, first)
    assert row["converged"] == 4
    assert row["samples"]["olympic_mean"] == (204 + 206 + 208) / 3
    assert row["samples"]["min"] == 202
    assert row["samples_ratio"] == 206 / 102
    assert row["samples_ratio_interval"] == [2.0, 2.0]
    two = [outcome(seed, 200, "aborted" if seed < 2 else "success") for seed in range(5)]
    assert summary("c", two, first)["samples_ratio"] is None


def test_which_way_is_better() -> None:
    assert reaches(0.8, 0.8, "higher")
    assert reaches(0.45, 0.45, "lower")
    assert not reaches(math.nan, 0.8, "higher")
    assert QualityConfig(metric="logloss").better == "lower"
    assert QualityConfig(metric="buy/auc").better == "higher"


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "quality.target is not set: give the auc at which a run is over"),
        ({"target": 0.6, "metric": "acu"}, "quality.metric=acu is unknown. Did you mean 'auc'?"),
        ({"target": 1.0, "metric": "calibration"}, "quality.metric=calibration has no way that is better"),
        ({"target": 0.6, "seeds": [3, 4, 3]}, "quality.seeds: 3 comes twice"),
        ({"target": 0.6, "every": 10}, r"quality.every=10: 10 samples are less than a step of row 'recipe'"),
        ({"target": 0.6, "every": 9000}, r"quality.every=9000: 9,000 samples are more than all of row"),
        ({"target": 0.6, "rows": ["residnt"]}, "quality.plugins: unknown 'residnt'"),
        ({"target": 0.6, "runs": 1, "metric": "gauc"}, "quality.metric=gauc: no evaluation has it; there"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as told:
        measured(tmp_path, **keys)
    assert "\n" not in str(told.value)


def test_knobs_of_no_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="task=time_to_quality takes its plugins from quality.plugins"):
        measured(tmp_path, "+plugin=fae", rows=["resident"], target=0.6)
