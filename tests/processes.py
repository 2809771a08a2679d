"""Processes for tests, forked from a server that has done the imports, which take seconds.

Arguments, environment, folder and output are the process's own. What a test asks of the start itself, of
torchrun, or of a library that reads the environment as it loads, needs a process from the beginning: see
test_startup, test_torchrun, test_memory and test_packaging.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import start_processes

from recpipe.cli import program
from recpipe.testing.apart import environment_of

ROOT = Path(__file__).resolve().parent.parent
SOURCE = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])
SECONDS = 240
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
"""What the fixture ``cli`` is."""


def server() -> ForkServerContext:
    """Where processes come from; it starts with the first one."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SOURCE)
        # To see whether there is a GPU otherwise keeps what is forked afterwards from using it.
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        forkserver.ensure_running()
    return context


def start_ranks(function: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """Run ``function(rank, *arguments)`` in ``world`` processes; the first error of one is raised here."""
    server()
    start_processes(function, arguments, nprocs=world, start_method="forkserver")


class Child:
    """A process in ``folder`` that runs ``python -m recpipe arguments``, or ``script`` with them.

    Its output goes into two files beside ``folder``; with ``merged``, all of it into the first.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        script: str | None = None,
        environment: Mapping[str, str] | None = None,
        merged: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
        own |= {"COLUMNS": "200", "PYTHONPATH": SOURCE, **(environment or {})}
        context = server()
        name = f"{folder.name}.{time.monotonic_ns()}"
        self.out = folder.parent / f"{name}.out"
        self.err = self.out if merged else folder.parent / f"{name}.err"
        self.out.touch()
        self.arguments = arguments
        what = (arguments, folder, own, (self.out, self.err), script)
        self.process = context.Process(target=_run, args=what)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def until(self, words: str) -> str:
        """Wait until it has said ``words``; what it has said up to then."""
        for _ in range(100 * SECONDS):
            alive = self.process.is_alive()
            said = self.out.read_text(encoding="utf-8")
            if words in said:
                return said
            assert alive, f"ended without '{words}':\n{said}{self.err.read_text(encoding='utf-8')}"
            time.sleep(0.01)
        self.process.kill()
        raise AssertionError(f"no '{words}' in {SECONDS} s:\n{said}")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.process.kill()
        self.process.join()

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end; an error, and its end, if it takes too long."""
        self.process.join(SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
        out, err = (file.read_text(encoding="utf-8") for file in (self.out, self.err))
        assert self.process.exitcode is not None, f"still running after {SECONDS} s:\n{out}{err}"
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, out, err)


def _run(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    files: Sequence[Path],
    script: str | None,
) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = ["recpipe", *arguments]
    if script is None:
        program()
    else:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})


@contextmanager
def ranks(folder: Path, world: int, *arguments: str, script: str | None = None) -> Iterator[list[Child]]:
    """``python -m recpipe arguments``, or ``script``, in ``world`` processes, with the environment of
    torchrun's ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = environment_of(world, store.port)
    children = [
        Child(
            folder,
            *arguments,
            script=script,
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            merged=script is not None,
        )
        for rank in range(world)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()


def run_ranks(folder: Path, world: int, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """How each of ``ranks`` ended."""
    with ranks(folder, world, *arguments) as children:
        return [child.ended() for child in children]
