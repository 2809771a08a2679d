"""Sweeps over several processes (hydra/launcher=torchrun) and the table of a sweep's jobs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from recpipe import cli as command_line
from recpipe.distributed.launch import agreed_arguments
from recpipe.errors import UserError
from recpipe.report import sweep
from recpipe.tasks import sweep_launcher as launcher
from recpipe.tasks.sweep_launcher import TorchrunLauncher
from tests.distributed.test_torchrun import SMALL, alone, difference
from tests.processes import ROOT, Cli
from tests.report.test_report import BARE, make_report

USE = ("-m", "hydra/launcher=torchrun", "hydra.launcher.nproc_per_node=2")
TORCHRUN = """
import json, os, sys
words = sys.argv[2:]
folder = next(w for w in words if w.startswith("hydra.run.dir=")).partition("=")[2].strip("'")
with open(os.path.join(folder, "told.json"), "w") as file:
    json.dump({"words": words, "env": dict(os.environ)}, file)
sys.exit(7 if "seed=2" in words else 0)
"""
STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank = subprocess.Popen(
    [sys.executable, "-c", "from signal import *; signal(SIGTERM, SIG_IGN); import time; time.sleep(99)"],
    start_new_session=True,
)
signal.signal(signal.SIGTERM, lambda *_: Path("asked").touch())
Path("pids.tmp").write_text(f"{os.getpid()} {rank.pid}")
os.replace("pids.tmp", "pids")
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """``start(script, *arguments)``: the command line in this process, ``script`` in torchrun's place."""

    def status(script: str, *arguments: str) -> int:
        (tmp_path / "torchrun.py").write_text(script)
        monkeypatch.setattr(launcher, "TORCHRUN", f"{tmp_path / 'torchrun.py'} {{}}")
        monkeypatch.setattr(TorchrunLauncher, "environment", os.environ)  # restored after the test
        monkeypatch.setattr(sys, "argv", ["recpipe", *arguments])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as caught:
            command_line.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return status


# -- the launcher ------------------------------------------------------------------------------


@pytest.mark.soak  # test_optimising.py launches jobs by torchrun's stand-in, tests/distributed has torchrun
def test_a_job_of_two_ranks(cli: Cli, tmp_path: Path) -> None:
    """Under torchrun itself, whose ranks train what one process trains."""
    swept = ("data.batch_size=65", SMALL[0], *SMALL[2:], "tiers.policy=lru", "tiers.store=ssd")
    export = f"task.export_parameters={tmp_path / 'parameters'}"
    done = cli(*USE, *swept, export, "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr
    assert "job 1/1: data.batch_size=65 data.samples=1300" in done.stdout
    assert done.stdout.count("report: sweep/sweep.html") == 1
    assert [path.name for path in (tmp_path / "cli").iterdir()] == ["sweep"], "no rank made a folder"
    sweep_dir = tmp_path / "cli" / "sweep"
    made = {path.name for path in sweep_dir.iterdir()}
    assert made == {"0", "multirun.yaml", "sweep.json", "sweep.html"}
    (job,) = json.loads((sweep_dir / "sweep.json").read_text())["jobs"]
    report = json.loads((sweep_dir / "0" / "report.json").read_text())
    assert job["state"] == "done"
    assert report["ranks"]["world"] == 2
    assert job["samples_per_second"] == report["throughput"]["samples_per_second"] > 0
    assert job["bytes_between_ranks"] > 1000
    # Each job of a sweep has a folder in a place that all are told.
    (tmp_path / "parameters" / "0").rename(tmp_path / "job")
    (tmp_path / "parameters").rmdir()
    (tmp_path / "job").rename(tmp_path / "parameters")
    alone(tmp_path / "one", base=swept)
    assert difference(tmp_path / "one", tmp_path) < 1e-5


@pytest.mark.soak
def test_a_sweep_of_two_ranks_each_goes_on_after_a_failed_job(cli: Cli, tmp_path: Path) -> None:
    swept = ("data.batch_size=64,0,65", SMALL[0], *SMALL[2:])
    done = cli(*USE, *swept, "trainer.max_steps=3", "hydra.sweep.dir=sweep")
    assert done.returncode == 2, done.stderr
    for number, size in enumerate((64, 0, 65), 1):
        assert f"job {number}/3: data.batch_size={size} data.samples=1300" in done.stdout
    assert "data.batch_size=0: must be greater than or equal to 1" in done.stderr, "the job's own output"
    assert "error: 1 of 3 jobs failed:\n  sweep/1: data.batch_size=0 " in done.stderr
    assert "(exit status 1)" in done.stderr.splitlines()[-1]
    jobs = json.loads((tmp_path / "cli" / "sweep" / "sweep.json").read_text())["jobs"]
    assert [job["state"] for job in jobs] == ["done", "failed", "done"]
    assert [job["differs"] for job in jobs] == [[f"data.batch_size={size}"] for size in (64, 0, 65)]


def test_jobs_get_their_own_overrides_and_the_users_environment(start, tmp_path, monkeypatch, capfd) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "GROUP_WORLD_SIZE",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    (tmp_path / "mine").mkdir()
    where = ("hydra.sweep.dir=a b", "hydra.job.name=mine")
    words = ("seed=1,2,3", "+plugin=[bagpipe,het]", "resume='x, y'", "hydra.launcher.max_restarts=3")
    assert start(TORCHRUN, "--config-dir=mine", *USE, *where, *words) == 2
    shown, said = capfd.readouterr()
    assert "job 2/3: seed=2 +plugin=[bagpipe,het]" in shown, said
    assert "error: 1 of 3 jobs failed:\n  a b/1: seed=2 " in said
    assert "(exit status 7)" in said
    for number in range(3):
        told = json.loads((tmp_path / "a b" / str(number) / "told.json").read_text())
        assert told["words"] == [
            "--max-restarts=3", "-m", "recpipe", f"--config-dir={tmp_path / 'mine'}", f"seed={number + 1}",
            "+plugin=[bagpipe,het]", "resume='x, y'", "hydra.job.name=mine",
            f"hydra.run.dir='{tmp_path / 'a b' / str(number)}'",
        ]  # fmt: skip
        assert not [name for name in told["env"] if "RANK" in name or "WORLD" in name or "MASTER" in name]
        assert "TORCHELASTIC_RUN_ID" not in told["env"]
        assert "HYDRA_FULL_ERROR" not in told["env"]
        assert told["env"]["PATH"] == os.environ["PATH"]


def test_a_failed_job_can_stop_the_sweep(start, tmp_path, capfd) -> None:
    words = (*USE, "seed=1,2,3,4", "hydra.launcher.stop_on_failure=true", "hydra.sweep.dir=sweep")
    assert start(TORCHRUN, *words) == 2
    assert "error: 1 of 4 jobs failed; 2 not started (stop_on_failure):\n  sweep/1: seed=2" in (
        capfd.readouterr().err
    )
    assert [job.state for job in sweep.read(tmp_path / "sweep")] == ["no report", "failed"]


def test_jobs_folders_are_hydras(start, tmp_path) -> None:
    words = (*USE, "seed=1,3", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${hydra.job.override_dirname}/x")
    assert start(TORCHRUN, *words) == 0
    assert [job.job for job in sweep.read(tmp_path / "sweep")] == ["seed=1/x", "seed=3/x"]


@pytest.mark.parametrize("again", [False, True], ids=["too slow", "a second signal"])
def test_a_signal_ends_the_running_job_and_the_sweep(start, tmp_path, monkeypatch, capfd, again) -> None:
    """torchrun is asked, and its ranks are left to it; what does not end is killed."""
    waited = subprocess.Popen.wait

    def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None and not again:
            while not (tmp_path / "asked").exists():  # however busy the machine is
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(process.args, timeout)
        return waited(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)

    def interrupt() -> None:
        for file in ("pids", "asked")[: 1 + again]:
            while not (tmp_path / file).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert start(STUBBORN, *USE, "seed=1,2", "hydra.sweep.dir=sweep") == 130
    thread.join()
    assert (tmp_path / "asked").exists()
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert gone(pid)
    assert [job.state for job in sweep.read(tmp_path / "sweep")] == ["stopped"]
    shown, said = capfd.readouterr()
    assert "stopping job 1" in shown
    assert said.endswith("interrupted\n")


def gone(pid: int) -> bool:
    """Whether the process has ended, or is a zombie that nobody has waited for yet."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_the_sweep_leaves_a_checkpoint(tmp_path, number) -> None:
    source = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    recipe = ("data.samples=40000", "trainer.max_epochs=50", "trainer.eval_every=20", "hydra.sweep.dir=sweep")
    words = [*SMALL[1:-1], *recipe, "tiers.policy=lru", "trainer.checkpoint_every=1000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "recpipe", *USE, "seed=1,2", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "train loss" in line:
            break
    process.send_signal(number)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "stopped by SIGTERM after step" in shown
    assert "job 2/2" not in shown
    assert len(list(tmp_path.glob("sweep/0/checkpoints/*.ckpt/MANIFEST.json"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*USE[:2], "hydra.launcher.nproc_per_node=0"),
            "hydra.launcher.nproc_per_node=0: must be at least 1",
        ),
        ((*USE, "hydra.launcher.max_restarts=-1"), "hydra.launcher.max_restarts=-1: must be at least 0"),
        ((*USE[:2], "hydra.launcher.nproc_per_node=two"), "Value 'two' of type 'str' could not be converted"),
        ((*USE, "trainer.max_stepz=1,2"), "Did you mean 'trainer.max_steps'?"),
        (("-m", "hydra/launcher=torchrn"), "no hydra/launcher 'torchrn'. Did you mean 'torchrun'?"),
        (USE[1:], "starts the jobs of a sweep: add -m"),
    ],
    ids=["no process", "restarts", "no number", "a job's key", "name", "no sweep"],
)
def test_mistakes_are_one_line_before_any_job(start, tmp_path, capfd, arguments, message) -> None:
    assert start(TORCHRUN, *arguments, "hydra.run.dir=run", "hydra.sweep.dir=sweep") == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert message in said[0]
    assert not list(tmp_path.glob("sweep/*/job.json"))


def test_a_sweep_under_torchrun_is_pointed_at_the_launcher() -> None:
    with pytest.raises(UserError, match="hydra/launcher=torchrun hydra.launcher.nproc_per_node=N"):
        agreed_arguments(["-m", "seed=1,2"])


# -- the table ---------------------------------------------------------------------------------


def put(folder: Path, words: list[str], report: object = None, **job: Any) -> None:
    """A job's folder: Hydra's overrides, the report (text as it is) and the launcher's file."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(words))
    if report is not None:
        text = report if isinstance(report, str) else json.dumps(report)
        (folder / "report.json").write_text(text)
    if job:
        (folder / "job.json").write_text(json.dumps(job))


def shown(directory: Path, width: int = 200) -> tuple[list[sweep.Job], str]:
    out = io.StringIO()
    jobs = sweep.report(directory, Console(file=out, width=width))
    return jobs, out.getvalue()


def test_the_table_has_every_job_in_order(tmp_path) -> None:
    whole = make_report().to_dict()
    ranks = whole["ranks"] | {"world": 2, "bytes_sent": 3 << 20, "bytes_received": 1 << 20}
    put(tmp_path / "2", ["seed=1", "+plugin=het"], {**whole, "altered": ["EXACT_GRADIENT"], "ranks": ranks})
    put(tmp_path / "10", ["seed=1", "+plugin=b[ad]"], exit_status=1)
    put(tmp_path / "1", ["seed=1", "+plugin=fae"], whole, exit_status=0)
    put(tmp_path / "1" / "runs" / "inner", ["seed=9"], whole)
    jobs, text = shown(tmp_path)
    assert [(job.job, job.state) for job in jobs] == [("1", "done"), ("2", "done"), ("10", "failed")]
    assert [job.differs for job in jobs] == [["+plugin=fae"], ["+plugin=het"], ["+plugin=b[ad]"]]
    one, two, ten = (
        next(line for line in text.splitlines() if line.startswith(n)) for n in ("1 ", "2*", "10")
    )
    assert " ".join(one.split()) == "1 +plugin=fae 24,106 20.42 0.7700 0.4900 0.8300 - 1 GiB done"
    assert two.split()[-5:] == ["4", "MiB", "1", "GiB", "done"]
    assert " ".join(ten.split()) == "10 +plugin=b[ad] - - - - - - - failed"
    assert "every job: seed=1" in text
    assert "* job 2 alters EXACT_GRADIENT" in text
    assert "job 10 failed: exit status 1" in text
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content["schema"] == 1
    assert content["every_job"] == ["seed=1"]
    assert content["jobs"][1]["bytes_between_ranks"] == 4 << 20
    page = (tmp_path / "sweep.html").read_text()
    assert '<a href="1/report.html">' in page
    assert page.count("<svg") >= 4
    assert "http" not in page.replace("http://www.w3.org", "")
    _, narrow = shown(tmp_path, width=80)
    assert "+plugin=fae" in narrow
    assert max(map(len, narrow.partition("every job")[0].splitlines())) <= 80


def predicting(**quality: float) -> dict[str, Any]:
    """A report of predictions that are no clicks."""
    nothing = dict.fromkeys(make_report().to_dict()["quality"])
    return make_report().to_dict() | {"quality": nothing | quality}


SECONDS = {"loss": 2.5, "mse": 2.5, "rmse": 1.58, "mae": 1.25}


@pytest.mark.parametrize(
    ("quality", "titles", "values"),
    [
        (SECONDS, ["loss", "MSE", "RMSE", "MAE"], "2.5000 2.5000 1.5800 1.2500"),
        ({"loss": 0.5, "poisson_deviance": 0.75}, ["loss", "Poisson deviance"], "0.5000 0.7500"),
        ({"loss": 0.5}, ["loss"], "0.5000"),
    ],
    ids=["values", "counts", "a loss alone"],
)
def test_jobs_show_the_figures_of_their_loss(tmp_path, quality, titles, values) -> None:
    put(tmp_path / "0", ["seed=1"], predicting(**quality))
    put(tmp_path / "1", ["seed=2"], predicting(**{name: 2 * value for name, value in quality.items()}))
    put(tmp_path / "2", ["seed=3"], exit_status=1)
    jobs, text = shown(tmp_path, width=80)
    assert jobs[1].quality["loss"] == 2 * quality["loss"]
    assert f" {values} " in " ".join(text.split())
    assert "AUC" not in text
    page = (tmp_path / "sweep.html").read_text()
    assert "".join(f'<th class="n">{title}</th>' for title in titles) in page
    first = next((title for title in ("RMSE", "Poisson deviance") if title in titles), "loss")
    assert f"{first} on the held-out part" in page
    assert json.loads((tmp_path / "sweep.json").read_text())["jobs"][0].items() >= quality.items()


def test_jobs_of_several_losses_show_the_figures_of_each(tmp_path) -> None:
    """More than one table of eighty columns holds."""
    put(tmp_path / "0", ["model.loss=binary_cross_entropy"], make_report().to_dict())
    put(tmp_path / "1", ["model.loss=mean_squared_error"], predicting(**SECONDS))
    _, text = shown(tmp_path, width=80)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert max(map(len, text.partition("report:")[0].splitlines())) <= 80
    assert any(line.endswith("- - - 2.5000 2.5000 1.5800 1.2500 done") for line in lines)
    assert any("0.7700 0.4900 0.8300 - - - - done" in line for line in lines)
    page = (tmp_path / "sweep.html").read_text()
    assert all(f"{title} on the held-out part" in page for title in ("AUC", "RMSE"))


def test_a_report_of_an_earlier_version_has_clicks_alone(tmp_path) -> None:
    quality = {"auc": 0.77, "logloss": 0.49, "ne": 0.83}
    put(tmp_path / "0", ["seed=1"], make_report().to_dict() | {"quality": quality})
    jobs, _ = shown(tmp_path)
    assert (jobs[0].state, jobs[0].quality) == ("done", quality)


DAMAGED = {
    "half": (json.dumps(make_report().to_dict())[:500].rpartition(",")[0], "delimiter: line 1 column"),
    "empty": ("", "Expecting value"),
    "a list": ([1], "no report of schema 1"),
    "another schema": ({"schema": 2}, "no report of schema 1"),
    "keys gone": ({"schema": 1, "throughput": None}, "no throughput.samples_per_second in it"),
    "text for a number": (
        make_report().to_dict() | {"memory": {"peak_rss_bytes": "1 GiB"}},
        "memory.peak_rss_bytes is no number",
    ),
    "no text": ("\ud800", "report.json"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_report_is_named_and_the_others_shown(tmp_path, kind) -> None:
    content, why = DAMAGED[kind]
    put(tmp_path / "0", ["seed=1"], make_report().to_dict())
    put(tmp_path / "1", ["seed=2"])
    if kind == "no text":
        (tmp_path / "1" / "report.json").write_bytes(b'{"schema": 1, "\xff\xfe')
    else:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "1" / "report.json").write_text(text)
    jobs, text = shown(tmp_path)
    assert [job.state for job in jobs] == ["done", "damaged"]
    (line,) = [line for line in text.splitlines() if "cannot read" in line]
    assert line.startswith(f"job 1 damaged: cannot read {tmp_path / '1' / 'report.json'}: ")
    assert why in line
    assert "cannot read" in (tmp_path / "sweep.html").read_text()


def test_jobs_without_figures(tmp_path) -> None:
    """Not a number in a report, no report, one of an earlier run, and files that tell nothing."""
    put(
        tmp_path / "0",
        ["seed=1"],
        make_report(quality=dict.fromkeys(("auc", "logloss", "ne"), float("nan"))).to_dict(),
    )
    put(tmp_path / "1", ["seed=2"])
    put(tmp_path / "2", ["seed=3"], make_report().to_dict(), exit_status=-9, stopped=False)
    put(tmp_path / "3", [], make_report().to_dict(), exit_status=1, stopped=True, overrides=["seed=4"])
    (tmp_path / "3" / ".hydra" / "overrides.yaml").write_text("{[")
    put(tmp_path / "4", ["seed=5"], exit_status=None)
    (tmp_path / "4" / "job.json").write_text("{")
    jobs, _ = shown(tmp_path)
    assert [job.state for job in jobs] == ["done", "no report", "failed", "stopped", "no report"]
    assert [job.differs for job in jobs] == [[f"seed={number}"] for number in range(1, 6)]
    assert jobs[0].quality == dict.fromkeys(("auc", "logloss", "ne"))
    assert [job.samples_per_second is None for job in jobs] == [False, True, True, True, True]
    assert jobs[2].exit_status == -9


def test_a_job_alone_shows_its_overrides(tmp_path) -> None:
    """Also one that trained nothing: there is nothing to draw."""
    put(tmp_path / "0", ["seed=1"], make_report(**BARE).to_dict())
    jobs, text = shown(tmp_path)
    assert jobs[0].state == "done"
    assert jobs[0].samples_per_second is None
    assert jobs[0].differs == ["seed=1"]
    assert "every job" not in text


def test_folders_that_are_no_sweep_are_refused(tmp_path, monkeypatch, capsys) -> None:
    put(tmp_path / "run", ["seed=1"], make_report().to_dict())
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for arguments, message in (
        (["none"], "no folder none: name that of a sweep"),
        (["file"], "no folder file"),
        (["empty"], "no job's folder in empty"),
        (["run"], "run is one run's folder"),
        ([], "say recpipe sweep-report DIR"),
        (["a", "b"], "say recpipe sweep-report DIR"),
        (["--all"], "say recpipe sweep-report DIR"),
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["recpipe", "sweep-report", *arguments])
        with pytest.raises(SystemExit) as caught:
            command_line.main()
        said = capsys.readouterr().err
        assert caught.value.code == 2
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert message in said
    monkeypatch.setattr(sys, "argv", ["recpipe", "sweep-report", "."])
    with pytest.raises(SystemExit) as caught:
        command_line.main()
    assert caught.value.code == 0
    assert "report: sweep.html" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_costs_neither_the_table_nor_the_other_file(tmp_path, capsys) -> None:
    put(tmp_path / "0", ["seed=1"])
    (tmp_path / "sweep.json.tmp").mkdir()
    line = f"cannot write {tmp_path}/sweep.json: Is a directory; mend that and say recpipe sweep-report"
    with pytest.raises(UserError, match=line):
        sweep.report(tmp_path)
    printed = capsys.readouterr().out
    assert "no report" in printed
    assert "sweep.html" in printed
    assert (tmp_path / "sweep.html").is_file()
