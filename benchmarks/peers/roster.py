"""The rows of the comparison: which script runs each, and what has to be installed for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REFERENCE = "hand_dmp"
FIND = "import sys, importlib.util as u; print(*(m for m in sys.argv[1:] if u.find_spec(m) is None))"


@dataclass(frozen=True)
class Project:
    """What a row trains with: modules that its interpreter must find, how to get them, a checkout's file."""

    modules: tuple[str, ...]
    install: str
    file: str = ""


@dataclass(frozen=True)
class Peer:
    """One row: a script of this folder, of which project, and its arguments after the work's directory."""

    project: str
    script: str
    arguments: tuple[str, ...] = ()


PROJECTS = {
    "torchrec": Project(("torchrec", "fbgemm_gpu"), "pip install torchrec fbgemm-gpu-cpu"),
    "recpipe": Project(("recpipe",), "run setup.sh, or put the checkout on PYTHONPATH"),
    "dlrm": Project(
        ("torch", "sklearn", "tensorboard", "tqdm"),
        "pip install torch scikit-learn tensorboard tqdm; "
        "git clone https://github.com/facebookresearch/dlrm, then --dlrm dlrm",
        "dlrm_s_pytorch.py",
    ),
    "fuxictr": Project(
        ("torch", "fuxictr"),
        "pip install torch fuxictr; git clone https://github.com/reczoo/FuxiCTR, then --fuxictr FuxiCTR",
        "model_zoo/DLRM/src/DLRM.py",
    ),
    "deepctr": Project(("torch", "deepctr_torch"), "pip install torch deepctr-torch"),
}
"""By the NAME of ``--python NAME=PATH``, and of the option with a project's checkout."""
PEERS = {
    "hand_dmp": Peer("torchrec", "hand_dmp.py"),
    "hand_fused": Peer("torchrec", "hand_unsharded.py", ("--fused",)),
    "hand_unsharded": Peer("torchrec", "hand_unsharded.py"),
    "dlrm": Peer("dlrm", "dlrm_s.py"),
    "dlrm_sgd": Peer("dlrm", "dlrm_s.py", ("--optimizer", "sgd")),
    "fuxictr": Peer("fuxictr", "fuxi.py"),
    "fuxictr_sgd": Peer("fuxictr", "fuxi.py", ("--optimizer", "SGD")),
    "deepctr": Peer("deepctr", "deepctr.py"),
    "recpipe": Peer("recpipe", "recpipe_cli.py"),
    "recpipe_bf16": Peer("recpipe", "recpipe_cli.py", ("model.precision=bfloat16",)),
    "loader": Peer("recpipe", "loader.py"),
}
DEFAULT = [name for name in PEERS if name != "loader"]


@dataclass(frozen=True)
class Places:
    """Where things are on this machine: interpreters and checkouts, by project."""

    pythons: Mapping[str, str]
    checkouts: Mapping[str, Path | None]

    def python(self, project: str) -> str:
        """The interpreter that a project's rows run in; by default this one."""
        return self.pythons.get(project, sys.executable)

    def missing(self, project: str) -> str:
        """What is not there of all that ``project`` needs; empty where nothing is."""
        known, python = PROJECTS[project], self.python(project)
        if known.file:
            checkout = self.checkouts.get(project)
            if checkout is None:
                return f"checkout of it (--{project} DIR)"
            if not (checkout / known.file).is_file():
                return f"{known.file} in {checkout}"
        try:
            done = subprocess.run(
                [python, "-c", FIND, *known.modules], capture_output=True, text=True, check=False
            )
        except OSError as fault:
            return f"Python at {python} ({fault.strerror})"
        if done.returncode:
            return f"Python at {python} that runs"
        absent = done.stdout.split()
        return f"{', '.join(absent)} in {python}" if absent else ""

    def command(self, peer: Peer, directory: Path) -> list[str]:
        """What runs ``peer`` on the work in ``directory``; its result is JSON in a line."""
        checkout = self.checkouts.get(peer.project)
        words = ["--checkout", str(checkout)] if checkout else []
        script = str(HERE / peer.script)
        return [self.python(peer.project), script, str(directory), *words, *peer.arguments]


def installed(names: list[str], places: Places) -> list[str]:
    """Those of ``names`` that can run here; prints a line for each one left out, with the remedy."""
    chosen = []
    absent = {project: places.missing(project) for project in {PEERS[name].project for name in names}}
    for name in names:
        project = PEERS[name].project
        if absent[project]:
            print(f"{name} is left out: there is no {absent[project]}. Get it: {PROJECTS[project].install}")
        else:
            chosen.append(name)
    return chosen
