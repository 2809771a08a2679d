"""A package's manifest.json and the digests of its files."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from recpipe.backend.host import processor
from recpipe.common.durable import sync
from recpipe.common.versions import FBGEMM, installed_version
from recpipe.inference.processor import InstructionSet, needed_flags
from recpipe.inference.score import SCHEMA

FORMAT = "recpipe package"
MANIFEST, DIGEST = "manifest.json", "manifest.sha256"


def versions() -> dict[str, str]:
    """What made the package."""
    fbgemm = next(filter(None, map(installed_version, reversed(FBGEMM))), "unknown")
    return {
        "recpipe": installed_version("recpipe") or "not installed",
        "torch": torch.__version__,
        "torchrec": version("torchrec"),
        "fbgemm_gpu": fbgemm,
        "python": platform.python_version(),
    }


def compiled_for(chosen: InstructionSet, options: Sequence[str]) -> dict[str, Any]:
    """What the dense part was compiled for, and where."""
    return {
        "machine": platform.machine(),
        "instruction_set": chosen.name,
        "cpu_flags": needed_flags(chosen, options),
        "made_on": {"processor": processor(), "torch_uses": torch.backends.cpu.get_cpu_capability()},
    }


def write_manifest(directory: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write manifest.json with the digest of every other file in ``directory``, then its own digest."""
    for name in (MANIFEST, DIGEST):
        (directory / name).unlink(missing_ok=True)
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    digests = {str(file.relative_to(directory)): sha256(file) for file in files}
    manifest = {"format": FORMAT, "schema": SCHEMA, **content, "files": digests}
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).encode()
    (directory / MANIFEST).write_bytes(text)
    # As sha256sum writes and checks it.
    (directory / DIGEST).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")
    for file in [*files, directory / MANIFEST, directory / DIGEST]:
        file.chmod(0o644)  # the server may be another user
        sync(file)
    for folder in {file.parent for file in files} | {directory}:
        sync(folder)
    return manifest


def sha256(file: Path) -> str:
    """The file's digest in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_package(directory: Path) -> bool:
    """Whether ``directory`` looks like a package, whole or not."""
    return (directory / MANIFEST).is_file() and (directory / DIGEST).is_file()
