"""SIGKILL of a process that has started others ends these as well, and leaves none of its folders."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from recpipe_serve.http.metrics import DIRECTORY
from recpipe_serve.workers import worker

from tests.processes import ROOT

STARTS = """
import subprocess, sys, time
from recpipe.tasks.process import started
run = started([sys.executable, "-c", "import time; time.sleep(600)"])
print(run.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death is Linux's")
def test_a_comparison_that_is_killed_ends_its_run() -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    run = int(parent.stdout.readline())
    assert Path(f"/proc/{run}").exists()
    parent.kill()
    parent.communicate()
    assert gone(run)


@pytest.mark.parametrize("killed", [True, False])
def test_workers_of_a_killed_supervisor_remove_its_folder(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / "counter_1.db").touch()
    monkeypatch.setenv(DIRECTORY, str(folder))
    sockets = [os.dup(file.fileno()) for file in worker.socket.socketpair()]
    about = {"sockets": sockets, "directory": ".", "config": {}, "name": "", "number": 0}
    about |= {"plugins": [], "at": None}
    monkeypatch.setattr(sys, "argv", ["worker", worker.json.dumps(about)])
    parents = iter([100, 1 if killed else 100])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(worker, "prepare_process", lambda: None)
    monkeypatch.setattr(worker, "Worker", lambda *_, **__: SimpleNamespace(run=lambda *_: None))
    assert worker.main() == 0
    assert folder.exists() is not killed
