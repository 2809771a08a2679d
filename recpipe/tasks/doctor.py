"""Checks whether the installed packages fit together, first by metadata, so that nothing has to be
imported."""

from __future__ import annotations

import ctypes
import importlib.metadata as metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.version import Version

from recpipe.common.versions import FBGEMM, TRIPLES, installed_version
from recpipe.errors import UserError

RUN_ON = {
    "2.14": "not yet run on a GPU",
    "2.13": "a third of the suite for a GPU run on an NVIDIA H200, 2026-11-27",
    "2.11": "run on an NVIDIA H100 and H200s, 2026-11-26 and 27",
}
"""By torch's release, what of each set for CUDA has run on a GPU."""
REQUIREMENTS = {
    ("2.14", False): "requirements/cpu-torch2.14.txt",
    ("2.14", True): "requirements/cuda-torch2.14.txt",
    ("2.13", False): "requirements/cpu.txt",
    ("2.13", True): "requirements/cuda.txt",
    ("2.11", True): "requirements/cuda-torch2.11.txt",
}
USUAL = {False: "2.13", True: "2.11"}
"""torch's release in the set that ./setup.sh installs, on a machine without a GPU and on one with it."""
OTHERS = (("hydra-core", "1.3.2", "1.5"), ("lightning", "2.5", "3"))
"""Distributions with their lowest supported and first unsupported version."""
CPU_WHEELS = "--extra-index-url https://download.pytorch.org/whl/cpu"
"""pip's option that finds torch's CPU build, which it otherwise passes over for the CUDA one."""
NVML = "libnvidia-ml.so.1"
"""A library of the NVIDIA driver, which FBGEMM's CUDA build needs in order to load."""
SKIP = "RECPIPE_SKIP_VERSION_CHECK"
CHECKOUT = Path(__file__).resolve().parents[2]

Versions = Callable[[str], str | None]


@dataclass(frozen=True)
class Finding:
    """One line about one package; ``remedy`` is the command that repairs it, empty if nothing is wrong."""

    about: str
    text: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.remedy


def minor(version: str) -> str:
    """The major and minor release, such as ``2.13`` for ``2.13.0+cpu``."""
    release = Version(version).release
    return f"{release[0]}.{release[1] if len(release) > 1 else 0}"


def install(cuda: bool, version: str | None = None, root: Path = CHECKOUT) -> str:
    """The command that installs a fitting set into this Python: from a checkout's file, otherwise by name.
    ``version``: torch's, which is kept if there is a set with it."""
    release = minor(version or USUAL[cuda])
    wanted = release if (release, cuda) in REQUIREMENTS else USUAL[cuda]
    file = REQUIREMENTS[wanted, cuda]
    pip = f"{sys.executable} -m pip install"
    if (root / file).is_file():
        pin = next(
            line for line in (root / file).read_text("utf-8").splitlines() if line.startswith("torch==")
        )
        first = "" if cuda else f"{pip} --no-deps {CPU_WHEELS} {pin} && "
        return f"cd {root} && {first}{pip} -r {file}"
    torch, torchrec, fbgemm = next(t for t in TRIPLES if t[0] == wanted)
    if cuda:
        return f"{pip} torch=={torch}.* fbgemm-gpu=={fbgemm}.* torchrec=={torchrec}.*"
    # torchrec depends on FBGEMM's CUDA build by name, so on a CPU machine it is installed without
    # dependencies.
    needs = "tensordict torchmetrics==1.0.3 tqdm pyre-extensions"
    first = f"{pip} {CPU_WHEELS} torch=={torch}.* fbgemm-gpu-cpu=={fbgemm}.* {needs}"
    return f"{first} && {pip} --no-deps torchrec=={torchrec}.*"


def check_triple(version: Versions, cuda: bool) -> list[Finding]:
    """Check torch, torchrec and fbgemm against the triples that fit together."""
    torch, torchrec = version("torch"), version("torchrec")
    fbgemm = next(((name, v) for name in reversed(FBGEMM) if (v := version(name))), None)
    missing = [n for n, v in (("torch", torch), ("torchrec", torchrec), ("fbgemm-gpu", fbgemm)) if v is None]
    if torch is None or torchrec is None or fbgemm is None:
        remedy = install(cuda, torch)
        return [Finding(name, f"{name} is not installed", remedy) for name in missing]
    found = (minor(torch), minor(torchrec), minor(fbgemm[1]))
    shown = f"torch {torch}, torchrec {torchrec}, {fbgemm[0]} {fbgemm[1]}"
    if found in TRIPLES:
        state = f"a set {RUN_ON[found[0]]}" if cuda else "a tested set"
        return [Finding("versions", f"{shown}: {state}")]
    nearest = next(t for release in (found[0], USUAL[cuda]) for t in TRIPLES if t[0] == release)
    fits = f"torch {nearest[0]} with torchrec {nearest[1]} and fbgemm-gpu {nearest[2]}"
    text = f"{shown}: no set known to fit; {fits} does" if cuda else f"{shown}: not a tested set; {fits} is"
    return [Finding("versions", text, install(cuda, nearest[0]))]


def check_fbgemm(version: Versions, owners: list[str], cuda: bool) -> list[Finding]:
    """Check that there is one build of FBGEMM, of torch's kind. ``owners``: the distributions that wrote
    ``fbgemm_gpu/``."""
    if not owners and not any(version(name) for name in FBGEMM):
        return []
    text = ""
    if len(owners) > 1:
        text = f"{' and '.join(owners)} both wrote fbgemm_gpu/: one overwrote the other"
    elif not owners:
        text = "fbgemm is listed as installed, but no distribution holds fbgemm_gpu/"
    elif owners == ["fbgemm-gpu"] and not cuda:
        text = "fbgemm-gpu is the CUDA build, but torch is a CPU build"
    elif owners == ["fbgemm-gpu-cpu"] and cuda:
        text = "fbgemm-gpu-cpu is the CPU build, but torch is a CUDA build"
    if text:
        remedy = f"{sys.executable} -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {install(cuda)}"
        return [Finding("fbgemm", text, remedy)]
    kind = "of the same kind"
    if torch_is_cuda() and not cuda:
        kind = "a CUDA build, which runs on this machine's CPU"
    return [Finding("fbgemm", f"fbgemm_gpu/ is {owners[0]}'s, and torch is {kind}")]


def fbgemm_owners() -> list[str]:
    """Distributions whose RECORD lists the library of ``fbgemm_gpu/``; one with metadata only owns
    nothing."""
    owners = []
    for name in FBGEMM:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        if any(PurePosixPath(f).parts[0] == "fbgemm_gpu" and f.suffix == ".so" for f in files):
            owners.append(name)
    return owners


def torch_is_cuda() -> bool:
    """Whether the installed torch is a CUDA build, without importing it."""
    version = installed_version("torch") or ""
    if "+" in version or not version:
        return "+cu" in version
    return any(needed.startswith(("nvidia-", "cuda-")) for needed in metadata.requires("torch") or [])


def is_for_gpu() -> bool:
    """Whether the installed set is one for a GPU. torch's CUDA build is for the CPU where FBGEMM's CPU build
    is beside it and there is no driver: not every index has torch's newest release as a CPU build."""
    return torch_is_cuda() and (has_driver() or fbgemm_owners() != ["fbgemm-gpu-cpu"])


def check_python(version: tuple[int, ...]) -> Finding:
    """Python 3.11 or newer."""
    shown = ".".join(map(str, version[:3]))
    if version < (3, 11):
        return Finding(
            "python", f"Python {shown} is too old: 3.11 or newer is needed", "python3.11 -m venv .venv"
        )
    return Finding("python", f"Python {shown}")


def check_others(version: Versions) -> list[Finding]:
    """Check that Hydra and Lightning are within the supported ranges."""
    findings = []
    for name, low, high in OTHERS:
        found, remedy = version(name), f"{sys.executable} -m pip install '{name}>={low},<{high}'"
        if found is None:
            findings.append(Finding(name, f"{name} is not installed", remedy))
        elif Version(low) <= Version(found) < Version(high):
            findings.append(Finding(name, f"{name} {found}"))
        else:
            findings.append(Finding(name, f"{name} {found} is outside {low} .. {high} (excluded)", remedy))
    return findings


PROBE = """
import torch, fbgemm_gpu
torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2]))
import torchrec
"""
GPU_PROBE = """
import fbgemm_gpu
from recpipe.common.device import tried_out
from recpipe.errors import UserError, shown
try:
    print(tried_out())
except UserError as fault:
    print(fault)
    raise SystemExit(2)
except RuntimeError as fault:
    first = shown(str(fault).partition("\\n")[0], 200)
    print(f"a GPU is there, but kernels do not run on it ({first}): see whether nvidia-smi and another "
          "program can use it, or set trainer.device=cpu")
    raise SystemExit(2)
"""


def has_driver() -> bool:
    """Whether this machine has the NVIDIA driver's libraries."""
    try:
        ctypes.CDLL(NVML)
    except OSError:
        return False
    return True


def check_loads(cuda: bool) -> Finding:
    """Import torch, FBGEMM's operators and torchrec in a separate process, because a clash can crash it."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROBE], capture_output=True, text=True)
    if done.returncode == 0:
        return Finding("load", "torch, FBGEMM's operators and torchrec load and run")
    if cuda and not has_driver():
        return Finding(
            "driver",
            f"this machine has no NVIDIA driver ({NVML} is not found), and fbgemm-gpu, a CUDA build, does "
            "not load without one; requirements/cpu.txt is the set for a machine without a GPU",
            f"install NVIDIA's driver; without a GPU: {sys.executable} -m pip uninstall -y torch fbgemm-gpu "
            f"&& {install(False)}",
        )
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    remedy = install(cuda, installed_version("torch"))
    return Finding("load", f"torch, fbgemm_gpu or torchrec does not load: {last}", remedy)


def check_gpu() -> Finding:
    """Run kernels of torch's and FBGEMM's on the first GPU, in a separate process."""
    command = [sys.executable, "-W", "ignore", "-c", GPU_PROBE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT)
    lines = (done.stdout if done.returncode in (0, 2) else done.stderr).strip().splitlines()
    said = lines[-1] if lines else f"exit status {done.returncode}"
    if done.returncode == 0:
        return Finding("gpu", said)
    text, _, remedy = said.rpartition(": ")
    return Finding("gpu", text or said, remedy)


def findings() -> list[Finding]:
    """Everything that ``recpipe doctor`` checks, in the order in which to repair it."""
    cuda = is_for_gpu()
    found = [
        check_python(sys.version_info[:3]),
        *check_triple(installed_version, cuda),
        *check_fbgemm(installed_version, fbgemm_owners(), cuda),
        *check_others(installed_version),
        _check_plugins(),
    ]
    if not all(installed_version(name) for name in ("torch", "torchrec")):
        return found
    loads = check_loads(cuda)
    return [*found, loads, *([check_gpu()] if cuda and loads.ok else ())]


def _check_plugins() -> Finding:
    """Check that recpipe is installed: pip makes the entry points by which the plugins in the tree are
    found."""
    version, command = installed_version("recpipe"), f"{sys.executable} -m pip install -e ."
    if version is None:
        text = "recpipe runs from its folder without being installed: its plugins are not found"
        return Finding("recpipe", text, command)
    if missing := missing_entry_points(CHECKOUT / "pyproject.toml"):
        text = f"recpipe's installation is older than its files: it lacks {', '.join(missing)}"
        return Finding("recpipe", text, f"cd {CHECKOUT} && {command}")
    return Finding("recpipe", f"recpipe {version}")


def missing_entry_points(project: Path) -> list[str]:
    """The tasks, commands and plugins of ``project``, a checkout's pyproject.toml, that recpipe's installed
    metadata lacks; none if there is no such file."""
    if not project.is_file():
        return []
    told = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"]
    there = {(ep.group, ep.name, ep.value) for ep in metadata.distribution("recpipe").entry_points}
    return [
        f"{group.removeprefix('recpipe.')}: {name}"
        for group, entries in told.items()
        for name, value in entries.items()
        if (group, name, value) not in there
    ]


def print_findings(_words: Sequence[str] = ()) -> int:
    """Print one line per finding and the command that repairs it; returns 0 if nothing is wrong, otherwise
    1."""
    found = findings()
    for finding in found:
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.text}")
        if not finding.ok:
            print(f"      mend it: {finding.remedy}")
    return 0 if all(finding.ok for finding in found) else 1


def check_versions() -> None:
    """Before a run, refuse an unknown set of torch, torchrec and fbgemm unless
    RECPIPE_SKIP_VERSION_CHECK=1."""
    if os.environ.get(SKIP):
        return
    cuda = is_for_gpu()
    for finding in check_triple(installed_version, cuda):
        if not finding.ok:
            raise UserError(f"{finding.text}. Mend it: {finding.remedy} (or try it as it is: {SKIP}=1)")
    # Another release may load without the driver; to try takes seconds, in which a run would end anyway.
    if cuda and not has_driver() and not (finding := check_loads(cuda)).ok:
        raise UserError(f"{finding.text}. Mend it: {finding.remedy}")
