"""task=compare: rows, interleaving, statistics, parameters, what a failure leaves, and child processes."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from recpipe.common.validation import typed
from recpipe.common.words import quoted
from recpipe.config.compose import compose as compose_recipe
from recpipe.config.task import CompareConfig
from recpipe.errors import UserError
from recpipe.model.metrics import judged
from recpipe.report.compared import RowResult, Run
from recpipe.report.figures import BY_LABEL
from recpipe.report.remarks import labels
from recpipe.run import run as run_recipe
from recpipe.tasks import compare_judge, process
from recpipe.tasks.compare import compare
from recpipe.tasks.compare_rows import carried_overrides, parse_rows
from tests.processes import Cli

ROOT = Path(__file__).parents[2]
INSTALLED = ("hotline", "fae", "slipstream")


def report(
    speed: float, auc: float = 0.77, altered: list[str] | None = None, rows: int = 0
) -> dict[str, Any]:
    return {
        "throughput": {"samples_per_second": speed},
        "quality": {"auc": auc, "logloss": 0.5, "ne": 0.8},
        "memory": {"peak_rss_bytes": 1 << 30, "resident_bytes": 1, "cold_bytes": 2, "tier_overhead_bytes": 3},
        "io": {"rows_read": rows, "rows_written": rows, "bytes_read": 64 * rows, "bytes_written": 64 * rows}
        | {"store": "host", "direct": None, "wait_seconds": 0.5},
        "data": {"train_samples": 1000},
        "altered": altered or [],
    }


def value_of(arguments: list[str], key: str) -> str | None:
    for argument in arguments:
        override = OverridesParser.create().parse_override(argument)
        if override.key_or_group == key:
            value = override.value()
            return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return None


class FakeRuns:
    """Stands in for child processes: reports and parameter offsets by row name, and a log of calls."""

    def __init__(
        self, reports: dict[str, list[dict[str, Any]]], offsets: dict[str, float] | None = None
    ) -> None:
        self.reports, self.offsets = copy.deepcopy(reports), offsets or {}
        self.rounding = 1e-7
        """What the run with nudged weights differs by."""
        self.calls: list[tuple[str, str]] = []
        self.arguments: list[list[str]] = []
        self.exports: list[Path] = []
        self.fault: Callable[[str, str, int], None] = lambda task, name, call: None
        self.limits: list[float] = []
        """The seconds that each run was given, under ``compare.minutes``."""

    def __call__(self, arguments: list[str], directory: Path, seconds: float | None = None) -> dict[str, Any]:
        if seconds is not None:
            self.limits.append(seconds)
        name = value_of(arguments, "plugin") or value_of(arguments, "tiers.policy") or ""
        task = value_of(arguments, "task") or ""
        assert value_of(arguments, "hydra.run.dir") == str(directory)
        self.calls.append((task, name))
        self.arguments.append(arguments)
        self.fault(task, name, len(self.calls))
        if task == "plan":
            return {}
        export, nudged = value_of(arguments, "task.export_parameters"), value_of(arguments, "task.nudge")
        if export:
            self.export(Path(export), self.rounding if nudged else self.offsets.get(name, 0.0))
        return report(1.0, auc=0.7701) if nudged else self.reports[name].pop(0)

    def export(self, directory: Path, offset: float) -> None:
        directory.mkdir(parents=True)
        self.exports.append(directory)
        table = np.zeros((1000, 8), np.float32)
        table[-1, -1] += offset
        np.save(directory / "t0.npy", table)
        np.save(directory / "t0.state.npy", np.ones(1000, np.float32))
        np.savez(directory / "dense.npz", weight=np.ones((3, 3), np.float32))


def config(*plugins: str, repetitions: int = 3, warmup: int = 1, **more: Any) -> CompareConfig:
    return CompareConfig(list(plugins), repetitions, warmup, 1, **more)


def run(
    cfg: CompareConfig, out: Path, runs: FakeRuns, overrides: tuple[str, ...] = ()
) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=80)
    content = compare(cfg, out, launch=runs, overrides=list(overrides), installed=INSTALLED, console=console)
    assert isinstance(console.file, io.StringIO)
    return content, console.file.getvalue()


def three_rows() -> FakeRuns:
    return FakeRuns(
        {
            "resident": [report(s) for s in (1, 100.0, 200.0, 50.0)],
            "lru": [report(s, 0.771, rows=100) for s in (1, 50.0, 120.0, 20.0)],
            "fae,slipstream": [report(s, altered=["SAMPLE_ORDER"]) for s in (1, 90.0, 90.0, 20.0)],
        },
        {"lru": 3e-7, "fae,slipstream": 5.0},
    )


def test_rows_run_interleaved_after_all_are_assembled(tmp_path: Path) -> None:
    runs = three_rows()
    run(config("resident", "lru", "fae+slipstream"), tmp_path, runs)
    order = ["resident", "lru", "fae,slipstream"]
    calls = [("plan", name) for name in order] + [("train", name) for name in order] * 4
    calls.insert(6, ("train", "resident"))  # once more, after the first round, to see what one rounding does
    assert runs.calls == calls
    assert "task.nudge=true" in runs.arguments[6]
    assert sum("task.nudge=true" in arguments for arguments in runs.arguments) == 1


def test_figures_are_medians_of_counted_rounds_and_ratios_pair_rounds(tmp_path: Path) -> None:
    content, _ = run(config("resident", "lru", "fae+slipstream"), tmp_path, three_rows())
    resident, lru, fae = content["rows"]
    assert resident["samples_per_second"] == {"median": 100, "min": 50, "max": 200}
    assert resident["ratio"] == 1
    assert lru["samples_per_second"] == {"median": 50, "min": 20, "max": 120}
    assert lru["ratio"] == 0.5
    assert lru["ratio_spread"] == {"median": 0.5, "min": 0.4, "max": 0.6}
    assert fae["ratio"] == 0.45  # of 0.9, 0.45, 0.4; the medians' ratio would be 0.9
    assert lru["auc_difference"] == pytest.approx(0.001)
    assert [row["name"] for row in content["rows"]] == ["resident", "lru", "fae+slipstream"]
    assert fae["altered"] == ["SAMPLE_ORDER"]
    assert lru["io"]["rows_read"] == 100


def test_exact_rows_get_their_parameter_difference_and_exports_go(tmp_path: Path) -> None:
    runs = three_rows()
    content, _ = run(config("resident", "lru", "fae+slipstream"), tmp_path, runs)
    assert [row["max_parameter_difference"] for row in content["rows"]] == [0, pytest.approx(3e-7), None]
    assert len(runs.exports) == 3 * 4 + 1  # of each round, and of the rounding
    assert not any(path.exists() for path in runs.exports)


def test_result_files_hold_the_public_schema(tmp_path: Path) -> None:
    content, text = run(config("resident", "lru", "fae+slipstream"), tmp_path, three_rows())
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert saved == json.loads(json.dumps(content))
    assert saved["schema"] == 1
    assert saved["partial"] is False
    assert saved["environment"]["torch"]
    for row in saved["rows"]:
        assert row.keys() >= {"name", "samples_per_second", "ratio", "auc", "logloss", "ne", "io", "altered"}
        assert "max_parameter_difference" in row
        assert row["samples_per_second"].keys() == {"median", "min", "max"}
    page = (tmp_path / "compare.html").read_text()
    assert page.count("<svg") == 6
    assert "<script" not in page
    for part in (
        "fae+slipstream*",
        "0.500",
        "3.0e-07",
        "alters SAMPLE_ORDER",
        "one rounding",
        "compare.html",
    ):
        assert part in text
    assert "!" not in text
    assert max(map(len, text.splitlines()[:-1])) <= 80


def test_each_row_links_to_the_report_of_its_first_counted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs write no pages; the comparison writes those that it links to."""
    runs = three_rows()
    drawn: list[str] = []

    def launch(arguments: list[str], directory: Path) -> dict[str, Any]:
        directory.mkdir(parents=True, exist_ok=True)
        assert ("task.page=false" in arguments) is (value_of(arguments, "task") == "train")
        assert ("task.beside=null" in arguments) is (value_of(arguments, "task") == "train")
        if value_of(arguments, "tiers.policy") != "lru":  # it has left no report
            (directory / "report.json").write_text(json.dumps({"run": directory.name}))
        return runs(arguments, directory)

    def write(report: dict[str, Any], directory: Path) -> None:
        assert report == {"run": directory.name}
        drawn.append(directory.name)
        (directory / "report.html").write_text("")

    monkeypatch.setattr("recpipe.report.run_page.write", write)

    content, _ = run(config("resident", "lru", "fae+slipstream"), tmp_path / "there", launch)  # type: ignore[arg-type]
    assert [row["run"] for row in content["rows"]] == [
        "runs/round-1-0-resident", "runs/round-1-1-lru", "runs/round-1-2-fae+slipstream"
    ]  # fmt: skip
    assert drawn == ["round-1-0-resident", "round-1-2-fae+slipstream"]
    (tmp_path / "there").rename(tmp_path / "moved")
    page = (tmp_path / "moved" / "compare.html").read_text()
    links = set(re.findall(r'<a href="([^"]*)"', page))
    assert links == {"runs/round-1-0-resident/report.html", "runs/round-1-2-fae%2Bslipstream/report.html"}
    assert all((tmp_path / "moved" / unquote(link)).is_file() for link in links)


def test_settings_of_rows_have_lines_of_their_own_with_short_keys(tmp_path: Path) -> None:
    names = [
        "lru:tiers.prefetch=false",
        "hotline:plugins.hotline.sample=0.1:tiers.prefetch=false:trainer.split=never",
    ]
    filling = report(100.0)
    filling["io"]["cold_start"] = True
    runs = FakeRuns({"lru": [filling], "hotline": [filling]})
    content, text = run(config(*names, repetitions=1, warmup=0), tmp_path, runs)
    assert [row["name"] for row in content["rows"]] == names
    lines = text.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    first, second = (i for i, line in enumerate(lines) if line.startswith("hotline~ "))
    for at in (first, second):  # the table of speeds, and that of quality
        assert [line.rstrip() for line in lines[at + 1 : at + 4]] == [
            " sample=0.1",
            " prefetch=false",
            " split=never",
        ]
    both = "~ lru (prefetch=false); hotline (sample=0.1, prefetch=false, split=never): cold start only"
    joined = " ".join(text.split())
    assert both in joined
    assert joined.count("cold start only") == 1
    page = (tmp_path / "compare.html").read_text()
    shown = (
        "hotline~<br><small>sample=0.1</small><br><small>prefetch=false</small><br><small>split=never</small>"
    )
    assert page.count(f'<th title="{names[1]}">{shown}</th>') == 2


def test_a_row_named_twice_shows_the_noise(tmp_path: Path) -> None:
    runs = FakeRuns({"lru": [report(s) for s in (100.0, 80.0)]})
    content, _ = run(config("lru", "lru", repetitions=1, warmup=0), tmp_path, runs)
    assert content["rows"][1]["ratio"] == 0.8
    assert runs.calls == [("plan", "lru"), ("train", "lru"), ("train", "lru")]


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        (("resident", "hotlin"), "unknown 'hotlin'. Did you mean 'hotline'?"),
        (("fae+slipstrem",), "unknown 'slipstrem' in row 'fae+slipstrem'. Did you mean 'slipstream'?"),
        (("lru+lfu",), "row 'lru+lfu' names 2 policies"),
        (("",), "unknown ''"),
    ],
)
def test_wrong_names_are_told_before_anything_runs(
    tmp_path: Path, plugins: tuple[str, ...], message: str
) -> None:
    runs = FakeRuns({})
    with pytest.raises(UserError) as caught:
        run(config(*plugins), tmp_path, runs)
    assert message in str(caught.value)
    assert runs.calls == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("repetitions", 0),
        ("repetitions", 2.5),
        ("warmup", -1),
        ("warmup", "x"),
        ("ranks", 0),
        ("plugins", []),
    ],
)
def test_wrong_numbers_of_rounds(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=re.escape(f"compare.{key}={value}: must ")):
        typed(CompareConfig, {**vars(config("lru")), key: value}, "compare")


def test_a_clash_is_told_by_row_before_any_training(tmp_path: Path) -> None:
    runs = three_rows()

    def clash(task: str, name: str, call: int) -> None:
        if name == "fae,slipstream":
            raise UserError("two plugins want the splitter")

    runs.fault = clash
    with pytest.raises(UserError, match=r"row 'fae\+slipstream': two plugins want the splitter"):
        run(config("resident", "lru", "fae+slipstream"), tmp_path, runs)
    assert {task for task, _ in runs.calls} == {"plan"}


@pytest.mark.parametrize(
    ("fault", "call"), [(KeyboardInterrupt(), 12), (UserError("disk full"), 11)], ids=["Ctrl-C", "first row"]
)
def test_what_is_finished_is_kept(tmp_path: Path, fault: BaseException, call: int) -> None:
    runs = three_rows()
    runs.fault = failing(call, fault)
    with pytest.raises(type(fault)):
        run(config("resident", "lru", "fae+slipstream"), tmp_path, runs)
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert saved["partial"] is True
    # Plans, warm-up, rounding and first round are 10 runs.
    assert [len(row["rounds"]) for row in saved["rows"]] == [1, 1, 1], "of the same, complete rounds"
    assert saved["rows"][0]["samples_per_second"]["median"] == 100
    assert saved["rows"][1]["ratio"] == 0.5
    assert (tmp_path / "compare.html").exists()
    assert not any(path.exists() for path in runs.exports)


def failing(at: int, fault: BaseException) -> Callable[[str, str, int], None]:
    """A ``FakeRuns.fault``: the run of that number fails."""

    def fail(task: str, name: str, call: int) -> None:
        if call == at:
            raise fault

    return fail


def test_a_row_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    runs = three_rows()
    runs.fault = failing(12, UserError("out of memory"))  # lru, in the second round
    with pytest.raises(UserError, match=r"^row 'lru': out of memory\. All else is in .*compare\.json$"):
        run(config("resident", "lru", "fae+slipstream"), tmp_path, runs)
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert saved["partial"] is False
    assert [len(row["rounds"]) for row in saved["rows"]] == [3, 1, 3]
    assert [row["failed"] for row in saved["rows"]] == [None, "row 'lru': out of memory", None]
    assert "! row &#39;lru&#39;: out of memory" in (tmp_path / "compare.html").read_text()
    assert runs.calls[-3:] == [
        ("train", "fae,slipstream"),
        ("train", "resident"),
        ("train", "fae,slipstream"),
    ]


# -- what the figures leave out and how sure they are --------------------------------------------


def test_every_row_has_three_speeds_and_ratios_of_each(tmp_path: Path) -> None:
    def measured(speed: float, steady: float, whole: float) -> dict[str, Any]:
        found = report(speed)
        found["throughput"] |= {
            "steady_samples_per_second": steady,
            "end_to_end_samples_per_second": whole,
        }
        return found

    runs = FakeRuns(
        {
            "lfu": [measured(100, 110, 50)] * 3,
            "hotline": [measured(98, 206, 20), *[measured(98, 205, 25)] * 2],
        }
    )
    content, text = run(config("lfu", "hotline", warmup=0, equal_memory=False), tmp_path, runs)
    row = content["rows"][1]
    assert row["ratio"] == 0.98
    assert row["steady"]["ratio"] == pytest.approx(205 / 110)
    assert row["end_to_end"]["ratio"] == 0.5
    assert row["end_to_end"]["samples_per_second"] == {"median": 25, "min": 20, "max": 25}
    assert row["end_to_end"]["ratio_interval"] == (0.4, 0.5)
    assert "0.980" in text
    assert "1.864" in text


def test_rounds_go_on_until_the_ratio_is_known_well_enough(tmp_path: Path) -> None:
    noisy = [report(s) for s in (50.0, 90.0, 70.0, 70.0, 70.0, 70.0, 70.0, 70.0)]
    steady = [report(100.0) for _ in range(8)]

    def rounds(name: str, **more: Any) -> tuple[int, bool]:
        runs = FakeRuns({"resident": steady, "lru": noisy})
        content, _ = run(config("resident", "lru", warmup=0, **more), tmp_path / name, runs)
        return content["counted"], content["precise"]

    assert rounds("exactly", precision=None) == (3, True)
    assert rounds("enough", precision=0.9) == (3, True)
    few, precise = rounds("more", precision=0.3, max_rounds=8)
    assert 3 < few < 8
    assert precise
    assert rounds("most", precision=0.01, max_rounds=5) == (5, False)
    assert rounds("default", precision=0.01) == (6, False)


def test_quality_over_several_seeds_is_paired_by_seed(tmp_path: Path) -> None:
    first = [report(100.0, auc=auc) | {"recipe": {"seed": 7}} for auc in (0.70, 0.72, 0.74)]
    other = [report(100.0, auc=auc) for auc in (0.71, 0.73, 0.75)]
    runs = FakeRuns({"resident": first, "lru": other})
    content, text = run(config("resident", "lru", repetitions=2, warmup=1, seeds=3), tmp_path, runs)
    seeds = [value_of(arguments, "seed") for arguments in runs.arguments if "task=train" in arguments]
    assert seeds == [None, None, "8", "8", "9", "9"]
    row = content["rows"][1]
    assert row["auc"] == pytest.approx(0.73)
    assert row["auc_difference"] == pytest.approx(0.01)
    low, high = row["auc_difference_interval"]
    assert (low, high) == (pytest.approx(0.01), pytest.approx(0.01))  # of pairs; unpaired it is 0.1 wide
    assert row["auc_interval"][1] - row["auc_interval"][0] == pytest.approx(2 * 4.303 * 0.02 / 3**0.5)
    assert "means over 3 seeds" in text
    assert "auc +0.01000 (+0.01000, +0.01000) better" in " ".join(text.split())
    assert [row[f"{name}_verdict"] for name in ("auc", "logloss")] == ["better", None]
    assert content["rows"][0]["auc_verdict"] is None


def test_a_policy_runs_at_the_memory_of_a_technique_that_takes_more(tmp_path: Path) -> None:
    def taking(resident: int, beside: int) -> list[dict[str, Any]]:
        memory = {"resident_bytes": resident, "tier_overhead_bytes": beside, "peak_rss_bytes": 0}
        return [report(100.0) | {"memory": memory} for _ in range(3)]

    reports = {
        "lru": [*taking(1000, 100)[:2], *taking(3000, 100)[:2]],
        "hotline": taking(1000, 110),
        "fae": taking(1000, 2100),
        "slipstream": taking(1000, 2150),
    }
    cfg = config("lru", "hotline", "fae", "slipstream", repetitions=2, warmup=0)

    class Budgeted(FakeRuns):
        def __call__(self, arguments: list[str], directory: Path) -> dict[str, Any]:
            if value_of(arguments, "tiers.resident_bytes"):
                self.reports["lru"] = taking(3000, 100)
            return super().__call__(arguments, directory)

    runs = Budgeted(reports)
    content, text = run(cfg, tmp_path, runs)
    names = [row["name"] for row in content["rows"]]
    assert names == ["lru", "hotline", "fae", "slipstream", "lru@fae"]
    budgets = [value_of(arguments, "tiers.resident_bytes") for arguments in runs.arguments]
    assert [budget for budget in budgets if budget] == ["3000", "3000"]  # 1000 and what fae takes beyond lru
    assert len(content["rows"][4]["rounds"]) == 2
    assert content["rows"][4]["memory_bytes"] == content["rows"][2]["memory_bytes"]
    assert "lru@fae" in text


def test_the_budget_is_corrected_where_what_a_policy_keeps_beside_its_rows_grows_too(tmp_path: Path) -> None:
    class Growing(FakeRuns):
        def __call__(self, arguments: list[str], directory: Path) -> dict[str, Any]:
            slots = int(value_of(arguments, "tiers.resident_bytes") or 1000)
            beside = 2000 if "+plugin=[fae]" in arguments else 100 + slots // 2
            memory = {"resident_bytes": slots, "tier_overhead_bytes": beside, "peak_rss_bytes": 0}
            return super().__call__(arguments, directory) | {"memory": memory}

    runs = Growing({name: [report(100.0) for _ in range(5)] for name in ("lru", "fae")})
    content, _ = run(config("lru", "fae", repetitions=2, warmup=0), tmp_path, runs)
    budgets = [value_of(arguments, "tiers.resident_bytes") for arguments in runs.arguments]
    # 1400 bytes more are 1400 / 1.5 bytes of rows and what belongs to them.
    assert [budget for budget in budgets if budget] == ["2400", "1933", "1933"]
    assert content["rows"][2]["memory_bytes"] == 1933 + 100 + 966
    assert len(content["rows"][2]["rounds"]) == 2


def test_a_row_can_have_settings_of_its_own(tmp_path: Path) -> None:
    runs = FakeRuns({"hotline": [report(s) for s in (100.0, 80.0, 90.0)]})
    names = ("hotline", "hotline:micro_batches=1", "hotline:tiers.prefetch=false:seed.x=1")
    content, _ = run(config(*names, repetitions=1, warmup=0), tmp_path, runs)
    assert [row["name"] for row in content["rows"]] == list(names)
    trained = [arguments for arguments in runs.arguments if "task=train" in arguments][:3]
    assert ["plugins.hotline.micro_batches=1" in arguments for arguments in trained] == [False, True, False]
    assert {"tiers.prefetch=false", "seed.x=1"} <= set(trained[2])
    assert not {"tiers.prefetch=false", "seed.x=1"} & set(trained[1])


def test_a_value_of_a_rows_setting_may_have_colons() -> None:
    name = "hotline:note=12:30, s3://a:b:+tiers.dir=/x:y:seed.x=1"
    (row,) = parse_rows([name], INSTALLED)
    assert row.settings == ("plugins.hotline.note=12:30, s3://a:b", "+tiers.dir=/x:y", "seed.x=1")
    assert labels([name])[0].settings == ("note=12:30, s3://a:b", "dir=/x:y", "x=1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("hotline:fast", "'fast' in row 'hotline:fast' is no key=value"),
        ("lru:x=1", "row 'lru:x=1' names 0 plugins, and 'x' may be a knob of any: write plugins.NAME.x=1"),
        ("hotlin:x=1", "unknown 'hotlin' in row 'hotlin:x=1'. Did you mean 'hotline'?"),
    ],
)
def test_settings_of_a_row_that_make_no_sense(row: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse_rows([row], INSTALLED)


def test_a_row_whose_cache_was_never_full_says_so(tmp_path: Path) -> None:
    filling = report(100.0)
    filling["io"]["cold_start"] = True
    window = report(100.0) | {"plugins": {"hotline": {"cold_start": "its window is longer than the run"}}}
    runs = FakeRuns({"nocache": [report(100.0)], "lru": [filling], "hotline": [window]})
    cfg = config("nocache", "lru", "hotline", repetitions=1, warmup=0)
    content, text = run(cfg, tmp_path, runs)
    assert [bool(row["cold_start"]) for row in content["rows"]] == [False, True, True]
    assert "lru~" in text
    assert "~ lru: cold start only, its cache was never full" in text
    assert "~ hotline: cold start only, hotline: its window is longer than the run" in text.replace("\n", " ")


def test_a_machine_that_others_use_is_told(tmp_path: Path) -> None:
    def shared(share: float) -> list[dict[str, Any]]:
        found = report(100.0)
        found["throughput"]["others_cpu_share"] = share
        return [found]

    for share, told in ((0.02, False), (0.37, True)):
        runs = FakeRuns({"lru": shared(share)})
        _, text = run(config("lru", repetitions=1, warmup=0), tmp_path / str(share), runs)
        assert ("other programs took 37% of this machine's processors" in text.replace("\n", " ")) is told


# -- rows that declare themselves exact ---------------------------------------------------------


def test_an_exact_row_is_judged_by_what_one_rounding_does(tmp_path: Path) -> None:
    runs = three_rows()
    content, text = run(config("resident", "lru", "fae+slipstream"), tmp_path, runs)
    assert [row["exact_as_declared"] for row in content["rows"]] == [True, True, None]
    rounding = content["rounding"]
    assert rounding["name"] == "resident"
    assert rounding["max_parameter_difference"] == pytest.approx(1e-7)
    assert rounding["auc_difference"] == pytest.approx(0.0001)
    assert rounding["allowed_max_parameter_difference"] == pytest.approx(rounding["factor"] * 1e-7)
    assert "one rounding of every first weight moves the parameters of resident by 1.0e-07" in text.replace(
        "\n", " "
    )


@pytest.mark.parametrize(
    ("offset", "rounding"), [(0.045, 1e-4), (2e-6, 1e-7), (1e-6, 0.0), (float("nan"), 1.0)]
)
def test_a_row_that_is_not_exact_is_marked_and_told_when_all_is_done(
    tmp_path: Path, offset: float, rounding: float
) -> None:
    runs = three_rows()
    runs.offsets["lru"], runs.rounding = offset, rounding
    console = Console(file=io.StringIO(), width=80)
    cfg = config("resident", "lru", "fae+slipstream")
    with pytest.raises(UserError, match="^row 'lru' declares itself exact, but its parameters differ by"):
        compare(cfg, tmp_path, launch=runs, overrides=[], installed=INSTALLED, console=console)
    assert isinstance(console.file, io.StringIO)
    *_, text = console.file.getvalue().split("round 3  fae+slipstream: ")
    page = (tmp_path / "compare.html").read_text()
    assert text.count("lru! ") == 2
    assert "! row 'lru' declares itself exact" in text
    assert page.count("<th>lru!</th>") == 2
    assert "declares itself exact" in page
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert [row["exact_as_declared"] for row in saved["rows"]] == [True, False, None]
    assert [len(row["rounds"]) for row in saved["rows"]] == [3, 3, 3]


def test_many_small_differences_are_found_by_their_mean(tmp_path: Path) -> None:
    one, other, rounded = (np.zeros(1000, np.float32) for _ in range(3))
    other += 1e-4
    rounded[0] = 1e-4
    folders = [export(tmp_path / n, t=t) for n, t in zip("abc", (one, other, rounded), strict=True)]
    apart, rounding = (compare_judge.differences(folders[0], folder) for folder in folders[1:])
    assert apart.largest == rounding.largest
    assert apart.rms == pytest.approx(1e-4, rel=1e-2)
    assert apart.within(rounding) is False
    assert rounding.within(rounding) is True


def test_exact_rows_are_compared_with_the_first_exact_one(tmp_path: Path) -> None:
    runs = three_rows()
    runs.offsets["resident"] = 3e-7
    content, _ = run(config("fae+slipstream", "lru", "resident"), tmp_path, runs)
    assert [row["max_parameter_difference"] for row in content["rows"]] == [None, 0, 0]
    assert content["rounding"]["name"] == "lru"
    assert content["rows"][1]["auc_difference"] == pytest.approx(
        0.001
    )  # figures of quality: to the first row


def test_nothing_is_run_for_the_rounding_where_all_rows_are_equal(tmp_path: Path) -> None:
    runs = three_rows()
    runs.offsets = {}
    content, text = run(config("resident", "lru"), tmp_path, runs)
    assert content["rounding"] is None
    assert [row["exact_as_declared"] for row in content["rows"]] == [True, True]
    assert "rounding" not in text
    assert len(runs.calls) == 2 + 2 * 4


def test_a_row_with_other_parameters_does_not_lose_the_rows_after_it(tmp_path: Path) -> None:
    runs = three_rows()
    usual = runs.export

    def other_model(directory: Path, offset: float) -> None:
        usual(directory, offset)
        if directory.parent.name == "1":
            np.save(directory / "t0.npy", np.zeros((5, 8), np.float32))

    runs.export = other_model  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"row 'lru' .* cannot be compared: parameter 't0.npy' has shape"):
        run(config("resident", "lru", "fae+slipstream"), tmp_path, runs)
    saved = json.loads((tmp_path / "compare.json").read_text())
    assert [row["exact_as_declared"] for row in saved["rows"]] == [True, False, None]
    assert "has shape" in saved["rows"][1]["not_comparable"]
    assert [len(row["rounds"]) for row in saved["rows"]] == [3, 3, 3]


MISDECLARED = """
import lightning as L
from recpipe.plugin.api import Contribution, Plugin

class P(Plugin):
    api = (2, 0)

    def contribute(self, ctx):
        return Contribution(callbacks=[ChangesAWeight()])

class ChangesAWeight(L.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        module.dense[0].data[0, 0] += 1e-3
"""


@pytest.fixture
def misdeclared(install: Callable[..., Path]) -> None:
    """A package with a plugin ``off`` that alters training and does not say so."""
    install("off", "# @package plugins.off\n{}\n", MISDECLARED)


@pytest.mark.usefixtures("misdeclared")
def test_a_plugin_that_is_not_what_it_declares_is_found_and_hotline_passes(tmp_path: Path) -> None:
    def launch(arguments: list[str], directory: Path) -> dict[str, Any]:
        return run_recipe(compose_recipe(arguments), directory)

    small = ["data.samples=2000", "data.batch_size=64", "data.table_scale=0.01", "trainer.max_steps=8"]
    quiet = ["trainer.progress=false", "trainer.logger=null", "trainer.checkpoint_every=null"]
    cfg = config("resident", "lru", "hotline", "off", repetitions=1, warmup=0, equal_memory=False)
    with pytest.raises(UserError, match="^row 'off' declares itself exact, but its parameters differ by"):
        compare(cfg, tmp_path / "out", launch=launch, overrides=[*small, *quiet], console=Console(quiet=True))
    saved = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["exact_as_declared"] for row in saved["rows"]] == [True, True, True, False]
    assert saved["rows"][1]["max_parameter_difference"] == 0
    assert saved["rounding"]["max_parameter_difference"] > 0
    assert saved["rows"][3]["samples_per_second"]["median"] > 0
    assert all((tmp_path / "out" / row["run"] / "report.html").is_file() for row in saved["rows"])
    assert (tmp_path / "out/runs/rounding-resident/report.json").is_file()
    assert not (tmp_path / "out/runs/rounding-resident/report.html").exists(), "no page links to it"


CHEATS = """
import lightning as L
from recpipe.plugin import Contribution, Invariant, Plugin

class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how):
        self.how = how
        if how == "inexact figures":
            self.alters = frozenset({Invariant.EXACT_GRADIENT})

    def contribute(self, ctx):
        return Contribution(callbacks=[Cheats(self.how)])

class Cheats(L.Callback):
    def __init__(self, how):
        self.how = how

    def on_validation_batch_start(self, trainer, module, batch, *_):
        if self.how == "leak":
            batch.dense = batch.dense + batch.labels[:, None]
        if self.how == "labels":
            batch.labels = 1 - batch.labels

    def on_validation_epoch_end(self, trainer, module):
        if "figures" in self.how:
            figures = module.evaluation.figures.items()
            module.evaluation.figures = {name: {**own, "auc": 0.9} for name, own in figures}
"""


def test_what_is_evaluated_is_judged_as_well(tmp_path: Path, install: Callable[..., Path]) -> None:
    """Labels leak into features, labels and figures are swapped; the parameters are the base row's."""
    install("cheats", "# @package plugins.cheats\nhow: none\n", CHEATS)

    def launch(arguments: list[str], directory: Path) -> dict[str, Any]:
        return run_recipe(compose_recipe(arguments), directory)

    small = ["data.samples=1500", "data.batch_size=64", "data.table_scale=0.01", "trainer.max_steps=3"]
    quiet = ["trainer.progress=false", "trainer.logger=null", "trainer.checkpoint_every=null"]
    hows = ("none", "leak", "labels", "figures", "'inexact figures'")
    names = ["resident", *(f"cheats:how={how}" for how in hows)]
    cfg = config(*names, repetitions=1, warmup=0, equal_memory=False)
    with pytest.raises(UserError) as told:
        compare(cfg, tmp_path / "out", launch=launch, overrides=[*small, *quiet], console=Console(quiet=True))
    saved = json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]
    assert [row["exact_as_declared"] for row in saved] == [True, True, False, False, False, None]
    assert [row["max_parameter_difference"] for row in saved] == [0, 0, 0, 0, 0, None]
    assert [row["max_prediction_difference"] for row in saved[:2]] == [0, 0]
    assert saved[2]["max_prediction_difference"] > 0.01
    message = str(told.value)
    assert "how=none" not in message
    assert "row 'cheats:how=leak' declares itself exact, but its held-out predictions differ by" in message
    assert "row 'cheats:how=labels': 300 of the 300 labels that it was evaluated with are not" in message
    assert message.count("its auc of 0.9 is not that of its held-out predictions") == 2
    assert not list((tmp_path / "out").glob("parameters*"))


def test_every_label_of_an_evaluation_is_judged(tmp_path: Path) -> None:
    """The second label's, whose figures stand beside those of the first one."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 2, (2, 60)).astype(np.float32)
    scores = rng.normal(size=(2, 60)).astype(np.float32)

    def fault(
        second: dict[str, Any], labels_of_second: Any = labels[1], scores_of_second: Any = scores[1]
    ) -> RowResult:
        """The row of a run whose second label differs so from that of a run before."""
        judge = compare_judge.Judge(tmp_path / "judged")
        every = [judged("clicks", *map(torch.from_numpy, pair)) for pair in zip(labels, scores, strict=True)]
        told = [{name: value for name, value in own.items() if np.isfinite(value)} for own in every]
        rows = []
        for index, (changes, own, found) in enumerate(
            [({}, labels[1], scores[1]), (second, labels_of_second, scores_of_second)]
        ):
            parameters, predictions = judge.exports(index)
            for folder, pair in (
                (predictions, (scores[0], labels[0])),
                (predictions / "a%2Fb", (found, own)),
            ):
                folder.mkdir(parents=True)
                np.save(folder / "0.npy", np.stack(pair))
            parameters.mkdir()
            np.save(parameters / "t.npy", np.zeros(3))
            by_label = {"click": told[0], "a/b": told[1] | changes}
            report = {"history": [told[0] | {"eval_loss": 0.5}], "quality": told[0], BY_LABEL: by_label}
            rows.append(RowResult(f"row {index}", [Run(0, 0, True, report)]))
            judge.add(index, rows[-1])
        judge.needs_rounding(0, 0)
        assert rows[0].evaluation_fault is None
        return rows[1]

    right = fault({})
    assert right.evaluation_fault is None
    assert right.runs[0].apart.predictions.largest == 0
    assert "a/b: its auc of 0.9 is not that of" in str(fault({"auc": 0.9}).evaluation_fault)
    flipped = fault({}, 1 - labels[1]).evaluation_fault
    assert flipped == "60 of the 60 labels of 'a/b' that it was evaluated with are not those of 'row 0'"
    other = fault({}, scores_of_second=scores[1] + 0.25)
    assert other.runs[0].apart.predictions.largest == pytest.approx(0.25, abs=1e-6)


def test_each_label_has_figures_of_its_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    kinds = {"click": rng.integers(0, 2, 300), "seconds": rng.normal(size=300), "w": rng.integers(0, 4, 300)}
    pq.write_table(pa.table({**kinds, "user": rng.integers(0, 50, 300)}), tmp_path / "rows.parquet")

    def launch(arguments: list[str], directory: Path) -> dict[str, Any]:
        return run_recipe(compose_recipe(arguments), directory)

    words = [
        "data=parquet",
        f"data.path={tmp_path / 'rows.parquet'}",
        "data.label=[click,seconds]",
        "data.label_kind={seconds: values}",
        "data.weight=w",
        "data.sparse=[user]",
        "data.table_rows=60",
        "data.batch_size=64",
        f"data.cache_dir={tmp_path / 'cache'}",
        *("trainer.progress=false", "trainer.logger=null", "trainer.checkpoint_every=null"),
    ]
    out, cfg = tmp_path / "out", config("resident", "lru", repetitions=1, warmup=0, equal_memory=False)
    console = Console(record=True, width=100, file=io.StringIO())
    compare(cfg, out, launch=launch, overrides=words, console=console)
    first, other = json.loads((out / "compare.json").read_text())["rows"]
    own = first["quality_by_label"]
    assert [*own] == ["click", "seconds"]
    assert own["click"]["auc"] == first["auc"]
    assert own["click"]["loss"] + own["seconds"]["loss"] == pytest.approx(first["loss"], rel=1e-12)
    assert "auc" not in own["seconds"]
    assert other["quality_by_label"]["seconds"]["mse_difference"] == 0
    assert other["exact_as_declared"] is True
    text = console.export_text()
    assert text.index("AUC") < text.index("MSE")
    assert "seconds" in (out / "compare.html").read_text()


def test_every_round_and_every_seed_is_judged(tmp_path: Path) -> None:
    def off_in_its_run(wrong: int) -> FakeRuns:
        reports = [report(100.0) | {"recipe": {"seed": 0}} for _ in range(7)]
        runs, trained = FakeRuns({"resident": reports, "lru": [*reports]}), []
        usual = runs.export

        def export(directory: Path, offset: float) -> None:
            if directory.parent.name == "1":  # lru
                trained.append(directory)
                offset = 1e-3 * (len(trained) == wrong)
            usual(directory, offset)

        runs.export = export  # type: ignore[method-assign]
        return runs

    said = "row 'lru' declares itself exact, but its parameters differ by 1.0e-03"
    with pytest.raises(UserError, match=rf"{said} \(rms .*\) in round 2, where"):
        run(config("resident", "lru"), tmp_path / "late", off_in_its_run(3))
    rows = json.loads((tmp_path / "late" / "compare.json").read_text())["rows"]
    assert [each["faults"] for each in rows[1]["judged"]] == [[], [], ["parameters"], []]
    seeds = off_in_its_run(2)
    with pytest.raises(UserError, match=rf"{said} \(rms .*\) in round 2 \(seed 1\), where"):
        run(config("resident", "lru", seeds=2, warmup=0), tmp_path / "seeds", seeds)
    nudged = [value_of(words, "seed") for words in seeds.arguments if "task.nudge=true" in words]
    assert nudged == ["1"], "the rows of the first seed are equal"


def test_what_declares_to_alter_and_did_not_is_judged_as_exact(tmp_path: Path) -> None:
    unused = report(90.0, altered=["SAMPLE_ORDER"]) | {"altered_in_run": []}
    reports = {"fae": [unused] * 2, "resident": [report(100.0)] * 2}
    content, text = run(config("fae", "resident", repetitions=1), tmp_path / "fair", FakeRuns(reports))
    assert [row["exact_as_declared"] for row in content["rows"]] == [True, True]
    assert [row["altered"] for row in content["rows"]] == [["SAMPLE_ORDER"], []]
    assert "fae: altered no SAMPLE_ORDER in these runs, and is judged as exact" in " ".join(text.split())
    assert "fae*" not in text
    off = FakeRuns(reports, {"fae": 0.1})
    with pytest.raises(UserError, match="^row 'fae' altered nothing, as its plugins say, but its parameters"):
        run(config("fae", "resident", repetitions=1), tmp_path / "off", off)


# -- time ---------------------------------------------------------------------------------------


def timed(seconds: float, out: Path) -> tuple[dict[str, Any], str]:
    """A comparison within a minute whose runs take ``seconds`` each, with ratios that are never precise."""
    runs, now = FakeRuns({"resident": [report(100.0)] * 99, "lru": [report(s) for s in range(1, 99)]}), [0.0]

    def take(task: str, name: str, call: int) -> None:
        now[0] += 0 if task == "plan" else min(seconds, runs.limits[-1])
        if seconds > runs.limits[-1]:
            raise process.OutOfTime

    runs.fault = take
    cfg, console = config("resident", "lru", minutes=1, precision=0.01), Console(file=io.StringIO(), width=80)
    more: dict[str, Any] = {"overrides": [], "installed": INSTALLED, "console": console}
    content = compare(cfg, out, launch=runs, clock=lambda: now[0], **more)
    assert isinstance(console.file, io.StringIO)
    return content, " ".join(console.file.getvalue().split())


def test_minutes_bound_a_comparison_and_rounds_go_on_while_there_is_time(tmp_path: Path) -> None:
    content, text = timed(2.0, tmp_path / "long")
    assert content["counted"] == 60 / 4 - 1, "beyond twice the repetitions; the first is the warm-up"
    assert (content["out_of_time"], content["partial"]) == (True, False)
    assert "14 rounds after 1 of warm-up, left out; ended by compare.minutes=1; speed" in text
    content, text = timed(14.0, tmp_path / "few")
    assert (content["counted"], content["out_of_time"], content["partial"]) == (1, True, True)
    assert [row["samples_per_second"]["median"] for row in content["rows"]] == [100, 2]


def test_a_first_round_that_is_too_long_shows_what_has_run(tmp_path: Path) -> None:
    content, text = timed(25.0, tmp_path / "warm-up")
    assert (content["counted"], content["out_of_time"], content["partial"]) == (0, True, True)
    assert [row["samples_per_second"]["median"] for row in content["rows"]] == [100, 1]
    assert "the warm-up alone (0 rounds after 1 of warm-up, whose speeds these are); ended by" in text
    content, _ = timed(40.0, tmp_path / "one")
    assert [row["auc"] for row in content["rows"]] == [0.77, None]
    with pytest.raises(UserError, match="^compare.minutes=1 ended before any run had; give more"):
        timed(90.0, tmp_path / "none")


def test_tables_are_shown_after_the_first_round_and_renewed(tmp_path: Path) -> None:
    runs, pages = three_rows(), []

    def look(task: str, name: str, call: int) -> None:
        page = tmp_path / "compare.html"
        pages.append(page.read_text() if page.exists() else "")

    runs.fault = look
    _, text = run(config("resident", "lru", "fae+slipstream"), tmp_path, runs)
    first, second = text.split("round 1  resident: 100 samples/s")
    assert "so far: the warm-up alone (0 rounds after 1 of warm-up, whose speeds these are)" in first
    assert "param" in first
    assert second.count("so far: ") == 2
    assert second.count("samples/s  ") >= 3
    shown = [bool(page) for page in pages]
    assert shown == [False] * 7 + [True] * 9, "plans, the warm-up and the rounding, then three rounds"
    assert pages[7] != pages[10]


def test_a_run_is_ended_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(tmp_path, monkeypatch, f'echo $$ > "{tmp_path}/pid"; exec sleep 60')
    with pytest.raises(process.OutOfTime):
        process.run_apart([], tmp_path / "run", seconds=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_interrupt_before_the_first_result_leaves_no_table(tmp_path: Path) -> None:
    runs = three_rows()

    def stop(task: str, name: str, call: int) -> None:
        raise KeyboardInterrupt

    runs.fault = stop
    with pytest.raises(KeyboardInterrupt):
        run(config("resident", "lru"), tmp_path, runs)
    assert not (tmp_path / "compare.json").exists()


def test_a_run_that_trained_nothing_is_told(tmp_path: Path) -> None:
    runs = FakeRuns({"lru": [{"throughput": {"samples_per_second": None}}]})
    with pytest.raises(UserError, match="row 'lru': trained nothing"):
        run(config("lru"), tmp_path, runs)


def test_the_users_overrides_reach_every_run_and_the_comparisons_own_do_not() -> None:
    rows = parse_rows(["lru", "hotline"], INSTALLED)
    mine = [
        "task=compare",
        "compare.plugins=[lru,hotline]",
        "task.export_parameters=x",
        "data.path='a b,{c}=$d.gz'",
        "seed=3",
        "~trainer.limit",
        "+plugins.hotline.sample_rate=0.1",
        "++plugins.hotline.other=1",
        "--config-dir=/x",
    ]
    carried = carried_overrides(mine, rows)
    common = ["data.path='a b,{c}=$d.gz'", "seed=3", "~trainer.limit"]
    assert carried["lru"] == [*common, "--config-dir=/x"]
    knobs = ["plugins.hotline.sample_rate=0.1", "++plugins.hotline.other=1"]
    assert carried["hotline"] == [*common, *knobs, "--config-dir=/x"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+plugin=hotline", "takes its plugins from compare.plugins"),
        ("+plugins.fae.x=1", "no row of compare.plugins"),
    ],
)
def test_overrides_that_contradict_the_rows(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        carried_overrides([override], parse_rows(["lru", "hotline"], INSTALLED))


def test_outside_the_command_line_there_are_no_overrides_to_carry(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run python -m recpipe task=compare"):
        run_recipe(compose_recipe(["task=compare"]), tmp_path)


@pytest.mark.parametrize(
    "name", ["plain", "a b", "it's", "x=1,y", "{a}[b]", "${a}", "back\\slash", "end\\", "\\'", "é+#"]
)
def test_quoted_paths_survive_hydra(tmp_path: Path, name: str) -> None:
    (tmp_path / "c.yaml").write_text("key: null\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("c", overrides=[quoted("key", Path("/tmp") / name)])
    assert cfg.key == f"/tmp/{name}"


def test_task_group_has_a_default_and_compare_is_chosen_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(
        f"defaults: [task: train, _self_]\nhydra: {{searchpath: ['file://{ROOT / 'conf'}']}}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        plain = compose("train")
        chosen = compose("train", overrides=["task=compare", "compare.plugins=[resident,fae+slipstream]"])
        plan = compose("train", overrides=["task=plan"])
    assert (plain.task.name, chosen.task.name, plan.task.name) == ("train", "compare", "plan")
    assert "compare" not in plain
    assert list(chosen.compare.plugins) == ["resident", "fae+slipstream"]
    assert (chosen.compare.repetitions, chosen.compare.warmup) == (5, 1)
    assert plain.task.export_parameters is None


# -- files --------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_costs_no_row_and_no_table(tmp_path: Path) -> None:
    (tmp_path / "compare.json.tmp").mkdir()
    runs, console = three_rows(), Console(file=io.StringIO(), width=80)
    with pytest.raises(UserError, match=f"^cannot write {tmp_path}/compare.json: Is a directory; choose"):
        compare(config("resident", "lru"), tmp_path, launch=runs, overrides=[], installed=[], console=console)
    assert isinstance(console.file, io.StringIO)
    assert "param" in console.file.getvalue()
    assert f"report: {tmp_path}/compare.html".replace("\n", "") in console.file.getvalue()
    assert (tmp_path / "compare.html").is_file()


def test_a_users_folder_of_parameters_stays(tmp_path: Path) -> None:
    (tmp_path / "parameters").mkdir()
    (tmp_path / "parameters" / "mine.npy").touch()
    run(config("resident", "lru"), tmp_path, three_rows())
    assert {f.name for f in tmp_path.iterdir()} == {"parameters", "compare.json", "compare.html"}
    assert (tmp_path / "parameters" / "mine.npy").exists()


# -- parameters ---------------------------------------------------------------------------------


def export(directory: Path, **arrays: np.ndarray[Any, Any]) -> Path:
    directory.mkdir()
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    np.savez(directory / "dense.npz", weight=np.zeros((2, 2), np.float32))
    return directory


def test_parameter_difference_finds_the_one_element_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_judge, "_CHUNK_FLOATS", 64)
    table = np.random.default_rng(0).random((100, 7), np.float32)
    for row, column in ((0, 0), (9, 1), (99, 6)):
        other = table.copy()
        other[row, column] -= 0.25
        a = export(tmp_path / f"a{row}", t=table)
        b = export(tmp_path / f"b{row}", t=other)
        assert compare_judge.parameter_difference(a, b) == pytest.approx(0.25, rel=1e-6)
    same = export(tmp_path / "same", t=table)
    assert compare_judge.parameter_difference(a, same) == 0


def test_parameter_difference_sees_state_dense_and_nan(tmp_path: Path) -> None:
    a = export(tmp_path / "a", t=np.zeros(4, np.float32))
    dense = export(tmp_path / "dense", t=np.zeros(4, np.float32))
    np.savez(dense / "dense.npz", weight=np.full((2, 2), 2, np.float32))
    assert compare_judge.parameter_difference(a, dense) == 2
    broken = export(tmp_path / "nan", t=np.array([0, np.nan, 0, 0], np.float32))
    assert np.isnan(compare_judge.parameter_difference(a, broken))


def test_exports_of_different_tables_are_refused(tmp_path: Path) -> None:
    a = export(tmp_path / "a", t=np.zeros(4, np.float32))
    with pytest.raises(UserError, match=r"different tables: \['u.npy'\]"):
        compare_judge.parameter_difference(a, export(tmp_path / "b", t=np.zeros(4), u=np.zeros(4)))
    with pytest.raises(UserError, match=r"shape \(4,\) in one run and \(5,\)"):
        compare_judge.parameter_difference(a, export(tmp_path / "c", t=np.zeros(5, np.float32)))
    with pytest.raises(UserError, match="none at all"):
        compare_judge.parameter_difference(tmp_path, tmp_path)


def test_pickled_arrays_are_never_loaded(tmp_path: Path) -> None:
    a = export(tmp_path / "a", t=np.zeros(1, np.float32))
    b = export(tmp_path / "b", t=np.array([object()]))
    with pytest.raises(ValueError, match=r"allow_pickle=False|Python objects"):
        compare_judge.parameter_difference(a, b)


# -- child processes ----------------------------------------------------------------------------


def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make ``sys.executable -m recpipe`` a shell script."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_launch_returns_the_report_and_drops_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    interpreter(
        tmp_path,
        monkeypatch,
        f'echo "$@"; mkdir "{out}/checkpoints"; echo \'{{"a": 1}}\' > "{out}/report.json"',
    )
    assert process.run_apart(["seed=1", "data.path=a b;$(c)"], out) == {"a": 1}
    assert (out / "run.log").read_text() == "-m recpipe seed=1 data.path=a b;$(c)\n"
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo noise; echo 'error: no such file x.gz' >&2; exit 2", "^no such file x.gz$"),
        (
            "echo Traceback; echo 'ValueError: odd'; exit 1",
            r"failed with status 1 \(ValueError: odd\); .*run.log",
        ),
        ("kill -9 $$", r"killed by signal 9 \(no output\)"),
    ],
)
def test_launch_tells_why_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    interpreter(tmp_path, monkeypatch, script)
    with pytest.raises(UserError, match=message):
        process.run_apart([], tmp_path / "run")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    started = tmp_path / "pid"
    interpreter(
        tmp_path, monkeypatch, f'echo $$ > "{started}.new"; mv "{started}.new" "{started}"; exec sleep 60'
    )
    # A shell's background job is started with SIGINT ignored, and then Python does not listen to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), sent)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), process.interrupt_on_sigterm():
        process.run_apart([], tmp_path / "run")
    thread.join()
    signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_run_starts_ends_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    interpreter(tmp_path, monkeypatch, "exec sleep 60")
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        os.kill(os.getpid(), sent)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), process.interrupt_on_sigterm():
        process.run_apart([], tmp_path / "run")
    signal.signal(signal.SIGINT, before)
    assert started[0].poll() is not None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("recpipe.run") is None, reason="recpipe.run is not there")
@pytest.mark.parametrize(
    "rows", [("lru",), pytest.param(("resident", "lru"), marks=pytest.mark.soak)], ids="+".join
)
def test_real_comparison_end_to_end(cli: Cli, tmp_path: Path, rows: tuple[str, ...]) -> None:
    """The comparison's runs are processes of its own, from the beginning."""
    rounds = [f"compare.plugins=[{','.join(rows)}]", "compare.repetitions=1", "compare.warmup=0"]
    few = ["data.samples=3000", "data.batch_size=64", "data.table_scale=0.01", "trainer.max_steps=5"]
    overrides = ["task=compare", *rounds, *few, quoted("hydra.run.dir", tmp_path)]
    done = cli(*overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "compare.json").read_text())
    assert [row["name"] for row in content["rows"]] == list(rows)
    lru = content["rows"][-1]
    assert lru["samples_per_second"]["median"] > 0
    assert lru["io"]["rows_read"] > 0
    assert lru["max_parameter_difference"] == 0
    assert (tmp_path / "compare.html").exists()
    assert not (tmp_path / "parameters").exists()


def test_a_comparison_leaves_the_gpu_to_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that uses a GPU takes memory of it, and all of it in an exclusive compute mode."""

    def used(*_: object) -> None:
        raise AssertionError("this process uses the GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("set_device", "empty_cache", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, used)
    monkeypatch.setattr("recpipe.tasks.compare.compare", lambda *_: {"rows": []})
    words = ["task=compare", "trainer.device=cuda"]
    assert run_recipe(compose_recipe(words), tmp_path, command_line=words) == {"rows": []}
    with pytest.raises(UserError, match="torch sees 1 GPU, numbered from 0"):
        run_recipe(compose_recipe([*words, "trainer.device=cuda:1"]), tmp_path, command_line=words)
