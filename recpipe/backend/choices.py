"""Measured choices between kernels, the machine that they are valid for, and the file that keeps them."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import ClassVar

import torch

from recpipe.common.machine import Load, disturbance, used_by_others
from recpipe.common.own_cache import own_folder, require_own, write_own
from recpipe.common.saved import Damaged, entries, parse_json
from recpipe.errors import UserError

Choices = dict[str, dict[str, dict[str, str]]]
"""Measured choices: for a kernel's signature, threads and samples, the faster of two ways.

Signatures are ``linear IN-OUT``; ``chain 13-512r-16`` (see ``chain.Chain``); ``dot FxD`` for TorchRec's
``InteractionArch`` of F features beside the dense vector; ``cross N-RANK xLAYERS`` for its
``LowRankCrossNet``; ``tables FxD OPTIMIZER`` for all tables of a dimension and an optimizer, with F features,
of which samples are the ids of each, followed by ``weighted`` where ids have weights and by ``fp16`` where
rows are float16; and ``model HASH`` (see ``sharing``).
{"linear 512-256": {"2": {"64": "addmm", "2048": "onednn"}}}: keys are strings, as in JSON.
"""
FIRST_SHARES = {"cores 1.0": 1.0, "cores 0.9": 0.9, "cores 0.8": 0.8}
"""The first core's fraction of an equal share of a batch, if cores share it."""
ANSWERS = ("addmm", "onednn", "plain", "cpu", "loops", "openmp", *FIRST_SHARES)
"""For a linear layer, ``addmm`` or ``onednn``; for a part of a model, ``plain`` (unchanged), ``cpu`` (torch's
operators, put together otherwise) or ``loops`` (compiled ones of recpipe's own); for a whole model,
``plain``, or converted ``openmp`` (threads share its operators) or a fraction (cores share its samples)."""


SCHEMA = 3
SAVE_SECONDS = 2.0
"""Answers are saved at least so often while others are measured."""


_log = logging.getLogger("recpipe")


@dataclass(frozen=True)
class Host:
    """A CPU and the libraries that compute on it. Choices are measured again for another one."""

    processor: str
    cores: int
    instruction_set: str
    """torch's vector instructions, then those that the environment allows oneDNN, MKL and numba."""
    torch_version: str
    float32_matmul: str
    """torch's precision setting, which decides between MKL and oneDNN."""

    @classmethod
    def current(cls) -> Host:
        """The host of this process."""
        limits = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "NUMBA_CPU_NAME")
        allowed = (os.environ.get(name, "") for name in limits)
        return cls(
            processor=processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            instruction_set=" ".join(filter(None, (torch.backends.cpu.get_cpu_capability(), *allowed))),
            torch_version=torch.__version__,
            float32_matmul=torch.get_float32_matmul_precision(),
        )

    def file(self, folder: Path) -> Path:
        """The file for its choices; other versions of recpipe use another one."""
        text = json.dumps([SCHEMA, asdict(self)], sort_keys=True)
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


class Notebook:
    """Choices known for this machine: those that earlier runs saved in ``folder``, and those of this process.

    An empty folder gets what this process has measured before, so that runs that keep no files do not measure
    again each time and round alike. What this process has measured for a folder stays its answer, whatever
    other processes save there meanwhile.
    """

    _measured: ClassVar[dict[Host, Choices]] = {}
    _answered: ClassVar[dict[tuple[Host, Path], Choices]] = {}
    """What this process has measured for a folder."""
    _disturbed: ClassVar[dict[Host, set[tuple[str, str, str]]]] = {}
    """Signature, threads and samples of answers that were measured while other programs used the machine.
    They serve this process, so that it rounds alike in all its runs, and are not saved."""
    _said: ClassVar[bool] = False
    _told: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, Host.current()
        self._there = load(folder, self.host)
        mine = self._measured.get(self.host, {})
        self.known = copy.deepcopy(self._there or mine)
        for signature, threads, samples in self._disturbed.get(self.host, ()):
            _sizes(self.known, signature, threads)[samples] = mine[signature][threads][samples]
        self._mine = self._answered.setdefault((self.host, folder), {})
        _add(self._mine, self.known)
        self._new: set[tuple[str, str, str]] = set()
        """Answers measured since the last ``keep``."""
        self._began: Load | None = None
        """The machine's load before the first of them."""
        self._since = 0.0

    def answer(self, signature: str, threads: int, samples: int, measure: Callable[[], str]) -> str:
        """The faster way, measured if it is not known."""
        known = _sizes(self.known, signature, str(threads))
        if str(samples) not in known:
            if not Notebook._said:
                _log.info("measuring what is fast on this machine; later runs take it from %s", self.folder)
            Notebook._said = True
            if not self._new:
                self._began, self._since = Load.now(), perf_counter()
            known[str(samples)] = _sizes(self._mine, signature, str(threads))[str(samples)] = measure()
            self._new.add((signature, str(threads), str(samples)))
            if perf_counter() - self._since >= SAVE_SECONDS:
                self.keep()
        return known[str(samples)]

    def knows(self, signature: str, threads: int, samples: int) -> bool:
        """Whether ``answer`` would not measure."""
        return str(samples) in self.known.get(signature, {}).get(str(threads), {})

    def keep(self) -> None:
        """Save the choices for later runs of this process and of others, as far as nothing disturbed them."""
        disturbed = self._disturbed.setdefault(self.host, set())
        why = disturbance(used_by_others(self._began)) if self._new else ""
        if why:
            if not Notebook._told:
                _log.warning("what was measured is used now and not kept: %s", why)
            Notebook._told = True
            disturbed |= self._new
        self._new = set()
        self._measured[self.host] = copy.deepcopy(self.known)
        kept = {
            signature: {
                threads: {n: found for n, found in sizes.items() if (signature, threads, n) not in disturbed}
                for threads, sizes in counts.items()
            }
            for signature, counts in self.known.items()
        }
        self._there = load(self.folder, self.host)
        _add(self._there, kept)  # what another process saved first stays
        if kept != self._there and any(sizes for counts in kept.values() for sizes in counts.values()):
            save(self.folder, self.host, kept)
            self._there = kept


def _sizes(choices: Choices, signature: str, threads: str) -> dict[str, str]:
    """The answers by samples, which may be added to."""
    return choices.setdefault(signature, {}).setdefault(threads, {})


def _add(choices: Choices, to: Choices) -> None:
    """Take ``choices`` in, in place of other answers to the same."""
    for signature, counts in choices.items():
        for threads, sizes in counts.items():
            _sizes(to, signature, threads).update(sizes)


def load(folder: Path, host: Host) -> Choices:
    """Load what earlier runs have measured on ``host``; may be empty. ``UserError`` if the file is
    damaged."""
    file = host.file(folder)
    require_own(folder)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"cannot read {file}: {fault}; delete it, and it is measured again") from fault
    try:
        found = entries({"schema": int, "choices": dict}, parse_json(text))
        if found["schema"] != SCHEMA:
            raise Damaged(f"schema {found['schema']}, not {SCHEMA}")
        return checked(found["choices"])
    except ValueError as fault:
        raise UserError(
            f"{file}: no choices of kernels ({fault}); delete it, and they are measured again"
        ) from fault


def checked(choices: object) -> Choices:
    """Check ``choices`` from a file or a checkpoint; ``Damaged`` if they are invalid."""
    if not isinstance(choices, dict):
        raise Damaged("the choices are no table")
    for name, threads in choices.items():
        if not isinstance(threads, dict) or not all(isinstance(sizes, dict) for sizes in threads.values()):
            raise Damaged(f"{name!r} has no table of threads and samples")
        for count, sizes in threads.items():
            numbers = (count, *sizes)
            if not all(isinstance(n, str) and n.isascii() and n.isdigit() and int(n) > 0 for n in numbers):
                raise Damaged(f"{name!r}: threads and samples are whole numbers above 0, not {numbers}")
            if not set(map(str, sizes.values())) <= set(ANSWERS):
                raise Damaged(f"{name!r}: {sorted(map(str, sizes.values()))} is not of {', '.join(ANSWERS)}")
    return choices


def save(folder: Path, host: Host, choices: Choices) -> None:
    """Write ``choices`` atomically. If that fails, log it; the next run then measures again."""
    file = host.file(folder)
    try:
        text = json.dumps({"schema": SCHEMA, "host": asdict(host), "choices": choices}, indent=1)
        write_own(own_folder(folder) / file.name, text)
    except OSError as fault:
        _log.warning("cannot keep the measured kernels in %s: %s", file, fault.strerror)


def processor() -> str:
    """The CPU's model; on Linux, Python itself does not know it."""
    return _listed("model name") or platform.processor() or platform.machine()


def made_by_intel() -> bool:
    """Whether Intel made this CPU, as far as the system says."""
    return _listed("vendor_id") == "GenuineIntel"


@cache
def _listed(field: str) -> str | None:
    """Linux's entries for the first core."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)
