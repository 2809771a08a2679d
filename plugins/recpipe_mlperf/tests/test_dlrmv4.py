"""The scaled profile of dlrmv4: its recipe on generated events, and its logs before MLPerf's checkers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recpipe_mlperf.benchmarks import BENCHMARKS, Facts, Sizes
from recpipe_mlperf.checks import Submission, failing_keys, scaled_rules
from recpipe_mlperf.clock import Evaluation, Timed
from recpipe_mlperf.config import QualityConfig
from recpipe_mlperf.log import write
from recpipe_mlperf.score import Outcome
from recpipe_mlperf.task import time_to_quality
from recpipe_mlperf.tests.here import QUIET, launched

from recpipe.common.validation import typed
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe

SIZES = Sizes(train_samples=100_000, eval_samples=5_000, target=0.7)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of events: users who go from an item to the next one of its category, mostly."""
    rng = np.random.default_rng(7)
    users, items = 400, 30
    user = rng.integers(0, users, 9_000)
    item = np.empty_like(user)
    last = rng.integers(0, items, users)
    for number, who in enumerate(user):
        last[who] = (last[who] + 6) % items if rng.random() < 0.9 else rng.integers(0, items)
        item[number] = last[who]
    columns = {"user": user, "item": item, "category": item % 6, "behavior": np.zeros_like(user)}
    file = tmp_path_factory.mktemp("events") / "events.parquet"
    pq.write_table(pa.table({**columns, "ts": 1_500_000_000 + np.arange(len(user))}), file)
    return file


def words(events: Path, *more: str) -> list[str]:
    return ["experiment=mlperf_dlrmv4", f"data.path={events}", *more]


def logged(folder: Path, events: Path, change: Any = None, division: str = "closed") -> Path:
    """The log of a run of the profile's recipe whose evaluations are made up: at the profile's places, the
    third one over the target."""
    recipe = Recipe.of(compose(words(events))).values
    facts, rules = Facts(recipe, SIZES, 0.02), BENCHMARKS["dlrmv4"]
    between = rules.steps(0.02, SIZES.train_samples, 512) * 512
    found = [
        Evaluation(4 * n, between * n, value, n, n + 0.5) for n, value in enumerate((0.6, 0.66, 0.71), 1)
    ]
    timed = Timed(1.8e9, 0.1, 3.5, "success", 1.0, found)
    run = Outcome(11, timed, {"recipe": recipe, "throughput": {"set_up_seconds": 5.0}}, "run")
    write(folder / "result_0.txt", division, ("recpipe", "here"), rules, facts, run)
    if change is not None:
        text = (folder / "result_0.txt").read_text()
        (folder / "result_0.txt").write_text(change(text))
    return folder / "result_0.txt"


@pytest.mark.parametrize("division", ["closed", "open"])
def test_the_profiles_recipe_passes_the_scaled_rules(tmp_path: Path, events: Path, division: str) -> None:
    """And fails the unchanged ones for the numbers that the copy has otherwise, and for no other."""
    rules = BENCHMARKS["dlrmv4"]
    log = logged(tmp_path, events, division=division)
    config = scaled_rules(tmp_path / "rules", rules, division, SIZES)
    assert failing_keys(log, "6.1.0", config) == []
    scaled = {key for change in rules.changes(division, SIZES) for key in change.keys}
    # All of them fail; an AUC of 0.71 is one.
    assert {*failing_keys(log, "6.1.0")} == scaled


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"samples_count": 4096', '"samples_count": 4608', "eval_accuracy"),
        ('"value": 0.71', '"value": 0.69', "eval_accuracy"),
        ('"key": "opt_sparse_name"', '"key": "opt_name_of_tables"', "opt_sparse_name"),
        ('"value": 0.0025', '"value": 0.025', "opt_base_learning_rate"),
        ('"value": 50,', '"value": 5,', "opt_learning_rate_warmup_steps"),
        ('"key": "config_filename"', '"key": "file"', "config_filename"),
    ],
)  # fmt: skip
def test_what_differs_is_rejected(tmp_path: Path, events: Path, old: str, new: str, key: str) -> None:
    log = logged(tmp_path, events, lambda text: text.replace(old, new))
    config = scaled_rules(tmp_path / "rules", BENCHMARKS["dlrmv4"], "closed", SIZES)
    assert key in failing_keys(log, "6.1.0", config)


def test_a_first_evaluation_left_out_is_rejected(tmp_path: Path, events: Path) -> None:
    def later(text: str) -> str:
        return "\n".join(line for line in text.splitlines() if '"samples_count": 2048}' not in line)

    log = logged(tmp_path, events, later)
    config = scaled_rules(tmp_path / "rules", BENCHMARKS["dlrmv4"], "closed", SIZES)
    assert failing_keys(log, "6.1.0", config) == ["eval_accuracy"]


@pytest.mark.soak
def test_ten_real_runs_pass(tmp_path: Path, events: Path) -> None:
    """Of the profile with narrow units; the quicker ones of dlrm_dcnv2 are in test_logs.py."""
    narrow = ["model.embedding_dim=16", "model.width=16", "model.heads=2", "model.hidden=[16]"]
    narrow += ["model.dropout=0"]
    config = typed(QualityConfig, {"benchmark": "dlrmv4", "target": 0.55, "every": 0.02}, "quality")
    quiet = ["trainer.progress=false", "trainer.backend=plain", "trainer.logger=null"]
    quiet += [f"data.cache_dir={tmp_path / 'cache'}"]
    time_to_quality(config, tmp_path / "run", words(events, *narrow, *quiet), launch=launched, console=QUIET)
    verdicts = Submission.of(tmp_path / "run").judge()
    assert [verdict.wrong for verdict in verdicts] == [[]] * 4
    assert verdicts[0].says == (
        "fails for eval_accuracy, eval_every_data_pct, eval_samples, max_sequence_length, "
        "opt_base_learning_rate, opt_learning_rate_warmup_steps, train_samples: not comparable with official "
        "results"
    )
