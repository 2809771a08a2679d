"""report.json's schema, the table on the terminal and report.html."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from recpipe.access.skew import Skew, TableSkew, skew_of
from recpipe.model.calibrated import Calibration
from recpipe.plugin.context import Io
from recpipe.report import figures, html, plots, run_page, run_plots, run_table, terminal
from recpipe.report.compared import merged
from recpipe.report.environment import environment
from recpipe.report.record import (
    DataFigures,
    Memory,
    Point,
    RankFigures,
    Resumed,
    RunReport,
    Series,
    TableMemory,
    Throughput,
    as_json,
    step_histogram,
    step_times,
    write_json,
)

pytestmark = pytest.mark.usefixtures("real_plots")


def make_report(**changes: Any) -> RunReport:
    seconds = list(np.random.default_rng(0).gamma(30, 0.0007, 500))
    curve = [
        Point(
            *(i, i * 512, 0.61, 20_000.0 + i),
            quality={"auc": 0.5 + i / 100, "logloss": 0.6, "ne": 0.9, "loss": 0.6},
            seconds=5.0 + i,
        )
        for i in range(1, 10)
    ]
    content: dict[str, Any] = {
        "task": "train",
        "recipe": {"seed": 1, "data": {"name": "synthetic"}},
        "assembly": {"slots": {"splitter": "hotline"}, "chains": {"stream": ["a", "b"]}},
        "altered": [],
        "data": DataFigures(1_000_000, 200_000, 26_000_000, 3),
        "throughput": Throughput.of_steps(
            [500] * len(seconds), seconds, set_up=5.0, evaluation=1.0, start_to_end=60.0
        ),
        "quality": {"auc": 0.77, "logloss": 0.49, "ne": 0.83, "loss": math.nan},
        "memory": Memory(1 << 30, 1 << 27, 1 << 31),
        "io": Io("ssd", True, 1234, 1000, 1 << 33, 1 << 32, 3.25),
        "plugins": {
            "hotline": {"popular_share": 0.713, "share_over_time": [0.5, 0.6, None], "cold_rows": 12345}
        },
        "environment": environment(),
        "history": curve,
    }
    return RunReport(**(content | changes))


BARE: dict[str, Any] = {
    "plugins": {},
    "assembly": {},
    "history": [],
    "io": Io(),
    "quality": {},
    "throughput": Throughput.of_steps([], []),
}

SCHEMA = {
    "schema": 1,
    "data": {"train_samples", "eval_samples", "lookups", "rejected_rows", "dropped_samples"},
    "throughput": {"samples_per_second", "step_ms"},
    "quality": {"auc", "logloss", "ne", "loss"},
    "memory": {"peak_rss_bytes", "resident_bytes", "cold_bytes"},
    "io": {"store", "direct", "rows_read", "rows_written", "bytes_read", "bytes_written", "wait_seconds"},
}


def test_report_json_has_every_public_key(tmp_path: Path) -> None:
    path = write_json(tmp_path / "new" / "report.json", make_report().to_dict())
    content = json.loads(path.read_text())
    assert path == tmp_path / "new" / "report.json"
    assert content["schema"] == SCHEMA["schema"]
    assert content.keys() >= {"task", "recipe", "assembly", "environment", "altered", "plugins", "history"}
    for section in ("data", "throughput", "quality", "memory", "io"):
        assert content[section].keys() >= SCHEMA[section]  # type: ignore[operator]
    assert content["throughput"]["step_ms"].keys() == {"p50", "p90", "p99"}
    assert content["history"][0].keys() == {
        "step", "samples", "auc", "logloss", "ne", "loss", "samples_per_second",
        "eval_loss", "seconds", "learning_rates",
    }  # fmt: skip
    assert list(tmp_path.glob("new/*")) == [path]


def test_not_a_number_and_infinity_become_null(tmp_path: Path) -> None:
    report = make_report(
        quality={"auc": math.nan, "ne": math.inf, "loss": -math.inf}, plugins={"p": {"x": [1.0, math.nan]}}
    )
    text = write_json(tmp_path / "report.json", report.to_dict()).read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert content["quality"] == dict.fromkeys(("auc", "ne", "loss"))
    assert content["plugins"]["p"]["x"] == [1.0, None]


def test_plain_turns_what_plugins_give_into_json() -> None:
    given = {
        "t": torch.tensor([1, 2]),
        "n": np.float32(0.5),
        "i": np.int64(3),
        4: {2, 1},
        "p": Path("a"),
        "b": True,
    }
    assert as_json(given) == {"t": [1, 2], "n": 0.5, "i": 3, "4": [1, 2], "p": "a", "b": True}
    assert as_json(np.float64("nan")) is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_step_percentiles_are_in_milliseconds() -> None:
    times = step_times([i / 1000 for i in range(101)])
    assert (times.p50, times.p90, times.p99) == pytest.approx((50, 90, 99))
    assert math.isnan(step_times([]).p50)


def test_step_histogram_counts_every_step_and_is_not_stretched_by_one() -> None:
    histogram = step_histogram([0.010 + i / 1e5 for i in range(500)] + [9.0])
    assert sum(histogram.counts) == 501
    assert len(histogram.edges_ms) == len(histogram.counts) + 1
    assert histogram.edges_ms[0] <= 10
    assert histogram.edges_ms[-1] > 9000
    assert sum(count > 0 for count in histogram.counts) > 5, "10 to 15 ms are several bins"
    assert step_histogram([0.02, 0.02]).counts == [2]


def test_environment_names_versions_and_machine() -> None:
    found = environment()
    assert found["torch"] == version("torch")
    assert found["ram_bytes"] > 1 << 28
    assert found["cores"] >= 1
    assert json.dumps(found)


def page_of(report: Mapping[str, Any]) -> str:
    return html.render(run_page.page(report))


def printed(report: RunReport, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    run_table.print_result(report.to_dict(), Path("outputs/x"), console)
    terminal.print_place(Path("outputs/x/report.html"), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_terminal_table_is_short_and_fits_80_columns() -> None:
    many = {name: {f"figure_{i}": i for i in range(40)} for name in ("hotline", "slipstream")}
    text = printed(make_report(plugins=many, altered=["SAMPLE_ORDER"]))
    assert len(text.splitlines()) <= 30
    assert max(map(len, text.splitlines())) <= 80
    assert "34 more in the report" in text


def test_terminal_table_says_what_matters() -> None:
    text = printed(make_report(altered=["SAMPLE_ORDER"]))
    for part in (
        "AUC 0.7700",
        "samples/s over all steps",
        "from start to end",
        "O_DIRECT",
        "popular share: 71.3%",
        "12,345",
        "SAMPLE_ORDER",
    ):
        assert part in text
    assert "3 bad rows left out" in text
    assert "outputs/x/report.html" in text


def test_terminal_reports_buffered_io_and_survives_markup() -> None:
    text = printed(make_report(io=Io("ssd", False), plugins={"p": {"note": "[red]x[/nope]"}}), width=120)
    assert "no O_DIRECT here" in text
    assert "[red]x[/nope]" in text


def test_ranks_and_an_emulated_network_are_shown_where_there_are_any() -> None:
    emulate = {"latency_us": 100.0, "gbit_per_s": 10.0}
    ranks = RankFigures(3, (0, 1), (2,), emulate, messages=4321, bytes_sent=1 << 20, bytes_received=1 << 21)
    text, page = printed(make_report(ranks=ranks), width=200), page_of(make_report(ranks=ranks).to_dict())
    assert "2 training, 1 holding rows, of 3" in text
    assert "100 us a message, 10 Gbit/s" in text
    for part in ("Ranks", "4,321", "100.0 us a message, 10.0 Gbit/s"):
        assert part in page
    assert "ranks" not in printed(make_report(), width=200)
    assert "Ranks" not in page_of(make_report().to_dict())


def test_a_resumed_run_is_shown_with_the_whole_and_its_part() -> None:
    resumed = Resumed("outputs/a/checkpoints/step-00000500.ckpt", 500, None, 488, 988, 1_500_000)
    text, page = (
        printed(make_report(resumed=resumed), width=200),
        page_of(make_report(resumed=resumed).to_dict()),
    )
    assert "from outputs/a/checkpoints/step-00000500.ckpt" in text
    assert "before: 500 steps, samples unknown" in text
    assert "this part: 488 steps, 1,000,000 samples" in text
    assert "whole run: 988 steps, 1,500,000 samples" in text
    assert max(map(len, printed(make_report(resumed=resumed)).splitlines())) <= 80
    for part in ("step-00000500.ckpt", "500 / -", "488 / 1,000,000", "988 / 1,500,000"):
        assert part in page
    assert "resumed" not in printed(make_report()) + page_of(make_report().to_dict())


def test_html_is_one_file_without_outside_resources(tmp_path: Path) -> None:
    page = run_page.write(make_report().to_dict(), tmp_path).read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)", page)
    assert not re.search(r"url\((?!#|&quot;#)", page)
    assert "@import" not in page
    assert "<script" not in page
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


def test_html_shows_curves_tables_and_recipe() -> None:
    page = page_of(make_report().to_dict())
    assert page.count("<svg") == 6  # AUC and loss by samples and by time, step times, the plugin's list
    for part in ("0.7700", "popular share", "71.3%", "seed: 1", "slots.splitter", "AUC on the held-out part"):
        assert part in page
    assert "prefers-color-scheme: dark" in page
    assert plots._INK not in page


def test_the_title_is_the_model_the_data_and_plugins_and_the_command_stands_on_top() -> None:
    command = "python -m recpipe data=criteo 'data.path=a b.gz' +plugin=hotline"
    report = make_report(model="dlrm", recipe={"data": {"name": "criteo"}}, command=command)
    page = page_of(report.to_dict())
    names = " + ".join(report.plugins)
    assert f"<title>dlrm on criteo with {names}: recpipe</title>" in page
    assert f"<h1>dlrm on criteo with {names}</h1>" in page
    assert page.index(command.replace("'", "&#39;")) < page.index('class="tiles"')
    given = make_report(model="Own", recipe={"data": {"name": "given"}}, plugins={}).to_dict()
    assert "<h1>Own on batches given from Python</h1>" in page_of(given)
    assert 'class="command"' not in page_of(given)
    assert "What the recipe altered" not in page_of(given)


def test_one_evaluation_is_no_curve() -> None:
    report = make_report().to_dict()
    titles = [plot.title for plot in run_plots.learning(report)]
    assert len(titles) == 4
    report["history"] = report["history"][:1]
    assert not any("held-out" in plot.title for plot in run_plots.learning(report))
    report["series"]["samples"], report["series"]["seconds"], report["series"]["loss"] = [], [], []
    assert run_plots.learning(report) == []


@pytest.mark.parametrize(
    ("log", "values", "ends"), [(False, [0.0, 1.0], (0, 1)), (True, [0.01, 1.0], (0.01, 1))]
)
def test_axes_of_shares_end_at_0_and_1(log: bool, values: list[float], ends: tuple[float, float]) -> None:
    axes = Figure().subplots()
    axes.plot(values, values)
    plots._dress(axes, "x", plots.Axis("", "share", log=log))
    low, high = axes.get_xlim()
    assert high == ends[1]
    assert low <= ends[0] + 1e-9
    assert low >= 0


def test_html_escapes_what_users_and_plugins_say() -> None:
    evil = "<script>alert(1)</script>"
    report = make_report(recipe={"x": evil}, plugins={evil: {"$x_share": evil, f"{evil} $\\frac": [1, 2]}})
    page = page_of(report.to_dict())
    assert "<script" not in page
    assert "&lt;script" in page


def test_a_run_with_nothing_to_show_still_has_a_report() -> None:
    report = make_report(**BARE)
    assert "<svg" not in page_of(report.to_dict())
    assert "plugin" not in page_of(report.to_dict())
    assert "AUC -" in printed(report)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1 << 33, "8 GiB"), (1536 << 20, "1.5 GiB")],
)
def test_sizes(value: float | None, text: str) -> None:
    assert figures.size(value) == text


def test_plugin_figures_take_their_unit_from_the_name() -> None:
    assert figures.figure("cold_bytes", 2048) == "2 KiB"
    assert figures.figure("wait_seconds", 1.234) == "1.23 s"
    assert figures.figure("hidden_share", 0.5) == "50.0%"
    assert figures.figure("rows", 1234567) == "1,234,567"
    assert figures.figure("on", True) == "True"
    assert figures.short(2_434_567) == "2.43M"


def table(name: str, rows: int, resident: int | None = 10) -> TableMemory:
    return TableMemory(name, rows, 16, 64 * rows, 4 * rows, resident, resident and 68 * resident, 68 * rows)


def full_report(**changes: Any) -> RunReport:
    """With all that is drawn."""
    steps = list(range(10, 110, 10))
    series = Series(
        steps, [10] * 10, [512 * s for s in steps], [5.0 + s for s in steps], [1e4] * 10, [0.5] * 10,
        [1000] * 10, list(range(0, 1000, 100)), [4096] * 10, [0] * 10,
    )  # fmt: skip
    memory = Memory(1 << 30, 1 << 27, 1 << 31, 5000, [table(f"C{n}", n) for n in range(1, 27)])
    skew = Skew(500, 3, [TableSkew(None, 351, 500, [0.01, 1.0], [0.4, 1.0])])
    bins = Calibration([0.1, 0.6], [0.2, 0.5], [100, 300])
    content = {"series": series, "memory": memory, "skew": skew, "calibration": bins}
    return make_report(**(content | changes))


def test_html_draws_tiers_skew_memory_and_calibration_where_they_are_measured() -> None:
    page = page_of(full_report().to_dict())
    assert page.count("<svg") == 6 + 6  # speed, hit rate, cold bytes, skew, memory, calibration
    for part in (
        "Hit rate: lookups",
        "Access skew, from 500 lookups of 3 batches",
        "Calibration: 400 held-out samples in 2 bins",
        "18 smaller tables",
        "26 tables, 1 to 26 rows, 351 in all",
    ):
        assert part in page
    assert page.count("smaller tables") == 2, "in the table and in the plot"
    assert "C2<" not in page


def test_a_verdict_stands_above_its_plugins_figures() -> None:
    plugins = {"hotline": {"a": 1, "verdict": "fetches were hidden"}}
    page = page_of(make_report(plugins=plugins).to_dict())
    assert page.index("fetches were hidden") < page.index(">a<")
    assert page.count("fetches were hidden") == 1
    assert ">verdict<" not in page


def test_tables_of_a_kind_are_one_line() -> None:
    tree: dict[str, Any] = {
        "cache": "lru",
        "tables": {f"C{n}": {"cache": "hotline", "init": None} for n in range(26)},
        "bytes": {f"C{n}": 1024 * (n + 1) for n in range(26)},
        "other": {"a": None, "b": None, "c": None, "d": None},
    }
    rows = dict(run_page.flat(tree))
    assert rows["tables.(26: C0, C1 … C25).cache"] == "hotline"
    assert rows["bytes"] == "26: 1 KiB to 26 KiB"
    assert rows["other.a"] == rows["other.d"] == "-", "only parts of one kind are folded"
    assert len(rows) == 1 + 2 + 1 + 4
    tree["tables"]["C3"] = {"cache": "fae", "init": None}
    rows = dict(run_page.flat(tree))
    assert rows["tables.C3.cache"] == "fae"
    assert rows["tables.(25: C0, C1 … C25).cache"] == "hotline"


def test_folded_tables_keep_their_sums() -> None:
    tables = [as_json(asdict(table(f"C{n}", n))) for n in range(1, 27)]
    for largest, lines in ((8, 9), (25, 26), (30, 26)):
        found = run_plots.folded(tables, largest)
        assert len(found) == lines
        assert sum(line["weight_bytes"] for line in found) == 64 * 351
        assert sum(line["resident_rows"] or 0 for line in found) == 260
    assert run_plots.folded([*tables, as_json(asdict(table("x", 1, None)))], 8)[-1]["resident_rows"] is None
    assert run_plots.folded([], 8) == []


def test_merged_intervals_keep_steps_ends_and_the_mean_speed() -> None:
    series = as_json(asdict(full_report().series)) | {"samples_per_second": [100.0, 300.0] * 5}
    found = merged(series, 5)
    assert found["step"] == [20, 40, 60, 80, 100]
    assert found["steps"] == [20] * 5
    assert found["samples_per_second"] == pytest.approx([150.0] * 5), "equal samples, not equal seconds"
    assert merged(series, 3)["steps"] == [40, 40, 20]
    assert merged({}, 3)["step"] == []


def test_skew_ends_at_all_rows_and_tells_a_few_hot_rows_from_equal_ones() -> None:
    counts = {"hot": np.array([1, 900, 99]), "even": np.full(1000, 2)}
    found = skew_of(counts, {"hot": 10_000, "even": 1000}, 3000, 7)
    assert found is not None
    everything, hot, even = found.tables
    assert (everything.name, hot.name, even.name) == (None, "hot", "even")
    assert (everything.rows, everything.lookups, found.batches) == (11_000, 3000, 7)
    for curve in found.tables:
        assert curve.share_of_rows[-1] == curve.share_of_lookups[-1] == 1
        assert np.all(np.diff(curve.share_of_lookups) >= 0)
    assert hot.share_of_lookups[0] == 0.9
    assert np.allclose(even.share_of_lookups, even.share_of_rows, rtol=1e-3)
    assert skew_of({}, {}, 0, 0) is None


def test_which_way_a_figure_is_better() -> None:
    sure = (0.01, 0.02)
    assert figures.verdict("auc", 0.8, 0.7, sure) == "better"
    assert figures.verdict("ndcg@5", 0.7, 0.8, (-0.2, -0.1)) == "worse"
    assert [figures.verdict(name, 0.8, 0.7, sure) for name in ("ne", "loss", "rmse")] == ["worse"] * 3
    assert figures.verdict("calibration", 1.1, 0.7, sure) == "better"
    assert figures.verdict("calibration", 1.1, 0.95, sure) == "worse"
    assert figures.verdict("auc", 0.8, 0.7, (-0.01, 0.02)) is None
    assert figures.verdict("auc", 0.8, 0.7, None) is None


def test_a_report_of_an_earlier_version_is_shown(tmp_path: Path) -> None:
    """It has null for every figure that does not fit, and nothing of evaluations beside them."""
    others = dict.fromkeys(("mse", "rmse", "mae", "poisson_deviance"))
    old = make_report().to_dict()
    del old["evaluated"]
    old["quality"] = {"auc": 0.77, "logloss": 0.49, "ne": 0.83, "loss": 0.49, **others}
    old["history"] = [{**point, **others} for point in old["history"]]
    assert "AUC on the held-out part" in html.render(run_page.page(old))
    console = Console(file=io.StringIO(), record=True, width=100)
    run_table.print_result(old, tmp_path, console)
    line = next(line for line in console.export_text().splitlines() if line.strip().startswith("quality"))
    assert line.split()[1::2] == ["AUC", "logloss", "NE"]
