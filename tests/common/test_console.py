"""What a run says: the same lines on the terminal and in recpipe.log, bars on a terminal, nothing lost."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from recpipe.common import meter as meters
from recpipe.common.console import LogFile, Screen, append_to_log, capture_logs, log, show, within
from recpipe.common.meter import Meter
from recpipe.common.process import quiet_libraries
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.training import progress
from tests.processes import Child

SMALL = (
    "data.samples=2000",
    "data.batch_size=64",
    "data.table_scale=0.01",
    "trainer.logger=null",
    "trainer.checkpoint_every=null",
    "trainer.eval_every=1.0",
    "trainer.max_epochs=2",
)
CLOCK = re.compile(r"^\d\d:\d\d:\d\d  ", re.MULTILINE)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
Terminal = Callable[[Callable[[], object]], str]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meters show something whenever they are asked, and the screen is that of no test runner."""
    monkeypatch.setattr(meters, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(meters, "REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(meters, "TICK_SECONDS", 1e6)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """``terminal(act)``: what a pseudo-terminal received while ``act`` ran with it as standard output."""

    def seen(act: Callable[[], object]) -> str:
        master, slave = pty.openpty()
        received = bytearray()

        def read() -> None:
            with os.fdopen(master, "rb", buffering=0) as screen:
                try:
                    while data := screen.read(4096):
                        received.extend(data)
                except OSError:  # Linux: the other end is closed
                    return

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(slave, "w", encoding="utf-8") as screen, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            act()
        reader.join()
        return received.decode()

    return seen


def train(folder: Path, *overrides: str) -> dict:
    return run(compose([*SMALL, *overrides]), folder)


def test_without_a_terminal_the_log_has_what_was_shown(tmp_path, capsys) -> None:
    train(tmp_path, "trainer.backend=plain")  # auto measures, and says so, once in a process
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "recpipe.log").read_text()
    assert "\r" not in shown
    assert "\x1b" not in shown
    lines = [CLOCK.sub("", line) for line in shown.splitlines()]
    beginnings = [
        "generating data: ",
        "1,600 samples to train",
        "planning: ",
        "building 26 tables: ",
        "filling the tables' rows  ",
        "training",
    ]
    assert [any(map(line.startswith, beginnings)) for line in lines[:5]] == [True] * 5
    assert re.fullmatch(
        r"step 17/50  epoch 1/2  [\d,]+ samples/s  loss 0\.\d{4}  \d:\d\d:\d\d left",
        next(line for line in lines if line.startswith("step 17/")),
    )
    assert any(re.match(r"evaluating  batch 3/7  .* left", line) for line in lines)
    assert any(re.match(r"step +50 +3,200 samples  train loss 0.*  AUC 0", line) for line in lines)
    assert " data      3,200 samples trained, 400 held out" in [line.rstrip() for line in lines]
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"


def test_lines_come_by_the_clock(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(meters, "LINE_SECONDS", 1e9)
    train(tmp_path, "trainer.max_epochs=1")
    assert not re.search(r"step \d+/|evaluating", capsys.readouterr().out)


def test_a_run_can_be_quiet(tmp_path, capsys) -> None:
    train(tmp_path, "trainer.progress=false", "trainer.max_epochs=1")
    shown = capsys.readouterr().out
    assert not re.search(r"step \d+/|evaluating", shown)
    assert "building 26 tables" in shown
    assert "AUC" in shown


def test_a_terminal_has_a_bar(tmp_path, terminal, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    seen = terminal(lambda: train(tmp_path))
    assert sys.stdout.isatty() is False, "rich gave standard output back"
    text = ESCAPES.sub("", seen)
    assert re.search(r"━ step 17/50  epoch 1/2  [\d,]+ samples/s  loss 0\.\d{4}  \d:\d\d:\d\d left", text)
    assert re.search(r"━ evaluating  batch 3/7 ", text)
    assert "v_num" not in text
    assert "Epoch 0" not in text
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "the cursor is back"
    lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines()]
    for line in (tmp_path / "recpipe.log").read_text().splitlines():
        assert line.rstrip() in lines, "the log has the lines, and not the bar's states"
    assert "step 17/50" not in (tmp_path / "recpipe.log").read_text()


def test_a_run_that_breaks_off_leaves_the_terminal_as_it_was(tmp_path, terminal, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")

    def act() -> None:
        with pytest.raises(UserError, match="not finite"):
            train(tmp_path, "optim.dense.lr=1e30")

    seen = terminal(act)
    assert "\x1b[?25l" in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


def test_the_loss_is_that_of_the_steps_since_it_was_shown(tmp_path, capsys) -> None:
    """Shown after every step, it is each step's own: their mean is what the evaluation says."""
    report = train(tmp_path, "trainer.max_epochs=1")
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)  \d:", capsys.readouterr().out)]
    assert len(losses) == 25
    assert sum(losses) / 25 == pytest.approx(report["history"][0]["loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("environment", "bar", "redraws"),
    [
        ({"COLUMNS": "40"}, False, True),
        ({"COLUMNS": "100"}, True, True),
        ({"COLUMNS": "100", "NO_COLOR": "1"}, True, True),
        ({"TERM": "dumb"}, False, False),
    ],
    ids=["40 columns", "100 columns", "no colour", "dumb"],
)
def test_terminals_of_all_kinds(tmp_path, terminal, monkeypatch, environment, bar, redraws) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def act() -> None:
        with capture_logs(tmp_path), Meter() as meter:
            meter.show(0.5, f"first {'x' * 60}")
            log.info("a line between")
            print("and one by somebody else")
            meter.show(0.75, "second")

    logging.getLogger("recpipe").setLevel(logging.INFO)
    seen = terminal(act)
    assert ("━" in seen or "╸" in seen) is bar
    assert ("\x1b[" in seen) is redraws
    text = [line.rstrip() for line in ESCAPES.sub("", seen).replace("\r", "\n").splitlines()]
    assert any(line.endswith("a line between") for line in text)
    assert "and one by somebody else" in text
    if redraws:
        assert max(map(len, text)) <= int(environment["COLUMNS"])
        assert "second" not in (tmp_path / "recpipe.log").read_text()
        assert ("\x1b[3" in seen) is ("NO_COLOR" not in environment) or not bar
    else:
        assert any("second" in line for line in text)


def test_two_bars_come_and_go(terminal) -> None:
    def act() -> None:
        with Meter() as outer:
            outer.show(0.1, "outer")
            with Meter() as inner:
                inner.show(0.5, "inner")
            outer.show(0.2, "outer again")
        with Meter() as later:
            later.show(0.5, "later")

    text = ESCAPES.sub("", terminal(act))
    assert re.search(r"outer.*inner.*outer again.*later", text, re.DOTALL)
    assert sys.stdout.isatty() is False


def test_an_error_takes_the_bar_away(terminal) -> None:
    def act() -> None:
        with Meter() as meter:
            meter.show(0.5, "half")
            raise ValueError("broken")

    def caught() -> None:
        with pytest.raises(ValueError, match="broken"):
            act()

    seen = terminal(caught)
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


def test_time_left_counts_from_where_the_work_began(capsys, monkeypatch, caplog) -> None:
    now = [100.0]
    monkeypatch.setattr(meters, "perf_counter", lambda: now[0])
    with caplog.at_level(logging.INFO, "recpipe"):
        meter = Meter(first=0.5)
        now[0] += 60
        meter.show(0.6, "a tenth in a minute")
    assert caplog.messages == ["a tenth in a minute  0:04:00 left"]


class HundredBatches:
    """A loader of data that end."""

    source = SimpleNamespace(dataset=SimpleNamespace(endless=False))

    def __len__(self) -> int:
        return 100


def test_after_an_evaluation_a_line_covers_all_the_time_between_lines(monkeypatch, caplog) -> None:
    now = [100.0]
    monkeypatch.setattr(meters, "LINE_SECONDS", 10.0)
    for module in (meters, progress):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    trainer: Any = SimpleNamespace(global_step=1, current_epoch=0)
    batch: Any = SimpleNamespace(consumed=64)
    shows = progress.Progress(100, cast(Any, HundredBatches()))

    def step() -> None:
        now[0] += 6
        shows.on_train_batch_end(trainer, cast(Any, None), {"loss": 1.0}, batch, 0)

    with caplog.at_level(logging.INFO, "recpipe"):
        shows.on_train_start(trainer, cast(Any, None))
        shows.on_validation_start(trainer, cast(Any, None))
        now[0] += 60
        shows.on_validation_end(trainer, cast(Any, None))
        step()
        assert not caplog.messages, "one step says little"
        step()
    assert caplog.messages[0].startswith("step 1/100  11 samples/s")


@pytest.mark.parametrize(
    ("rank", "level"), [(None, logging.INFO), ("0", logging.INFO), ("1", logging.WARNING)]
)
def test_of_several_processes_the_first_one_tells(monkeypatch, rank, level) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    quiet_libraries()
    assert log.level == level
    monkeypatch.undo()
    quiet_libraries()


HEAD = """
import os, sys, threading
from recpipe.cli import program
reads, writes = os.pipe()
os.dup2(writes, 1)
os.close(writes)

def first_line():
    with os.fdopen(reads) as pipe:
        pipe.readline()

threading.Thread(target=first_line, daemon=True).start()
program()
"""


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path) -> None:
    """As ``| head -1`` does: the reports are whole, and nothing is complained of."""
    done = Child(tmp_path / "cli", *SMALL, f"hydra.run.dir={tmp_path / 'run'}", script=HEAD).ended()
    assert (done.stderr, done.returncode) == ("", 0)
    assert {"report.json", "report.html"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert "writing the report" in (tmp_path / "run" / "recpipe.log").read_text()


def test_a_refused_log_costs_nothing_else(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(log, "propagate", False)  # a library that was imported first may print it once more
    (tmp_path / "file").write_text("not a folder")
    with capture_logs(tmp_path / "file"):
        log.warning("one")
        log.warning("two")
        append_to_log("three")
    said = capsys.readouterr()
    assert [CLOCK.sub("", line) for line in said.out.splitlines()] == ["warning: one", "warning: two"]
    assert said.err.count("\n") == 1
    assert "cannot write" in said.err
    assert not [h for h in log.handlers if isinstance(h, Screen | LogFile)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_costs_the_log_alone(capsys) -> None:
    handler = LogFile("/dev/full")
    record = logging.LogRecord("recpipe", logging.INFO, "", 0, "a line", (), None)
    for _ in range(2):
        handler.handle(record)
    handler.close()
    assert capsys.readouterr().err == (
        "warning: cannot write /dev/full: No space left on device; going on without it\n"
    )


def test_a_table_is_in_the_log_without_its_colours(tmp_path, capsys) -> None:
    colours = Console(file=io.StringIO(), force_terminal=True, width=30)
    with capture_logs(tmp_path):
        show(lambda out: out.print("[bold]wide[/bold] " * 8), colours)
    assert "\x1b[1m" in colours.file.getvalue()  # type: ignore[attr-defined]
    text = (tmp_path / "recpipe.log").read_text()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 30
    assert text.split() == ["wide"] * 8
    assert capsys.readouterr().out == ""


def test_a_run_within_another_one_says_nothing_and_leaves_its_handlers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, screen = logging.getLogger(), Screen()
    monkeypatch.setattr(root, "handlers", [screen])  # as Hydra leaves them
    log.warning("before")
    with within(), capture_logs(None, screen=False):
        logging.warning("within")
        log.warning("within")
        show(lambda out: out.print("within"))
    assert root.handlers == [screen]
    log.warning("after")
    with capture_logs(tmp_path), within(), capture_logs(None, screen=False):
        log.warning("within")
    told = capsys.readouterr()
    assert ("before" in told.out, "after" in told.out, "within" in told.out + told.err) == (True, True, False)
