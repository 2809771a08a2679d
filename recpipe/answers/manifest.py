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

from recpipe.answers.content import Content
from recpipe.answers.processor import InstructionSet, needed_flags
from recpipe.answers.score import DIGEST, MANIFEST, SCHEMA, SIGNATURE, PackageError, sealed
from recpipe.answers.signature import PrivateKey, require_signed, signed
from recpipe.backend.choices import processor
from recpipe.common.files import sync
from recpipe.common.validation import fitted
from recpipe.common.versions import FBGEMM, installed_version
from recpipe.errors import UserError, shown

FORMAT = "recpipe package"


def read_manifest(directory: Path, trust: Path | None = None) -> dict[str, Any]:
    """The manifest of the package ``directory``, read as a recipe is. Nothing of the package has run then,
    and its other files have not been read.

    ``trust``: the public key that must have signed it. ``UserError`` names what is missing or wrong.
    """
    file = directory / MANIFEST
    try:
        manifest = sealed(directory)
        if trust is not None:
            require_signed(directory, trust)
    except PackageError as fault:
        raise UserError(str(fault)) from fault
    except OSError as fault:
        raise UserError(f"cannot read {fault.filename or file}: {fault.strerror}") from fault
    content: Content = fitted(Content, manifest, str(file))
    features = [feature["name"] for feature in content["sparse"]]
    outputs = [output["name"] for output in content["outputs"]]
    reference = content.get("reference")
    unknown = [
        *(name for name in (*features, *outputs) if (features + outputs).count(name) > 1),
        *(name for lookup in content["lookups"] for name, _ in lookup["parts"] if name not in features),
        *(
            name
            for lookup in content["lookups"]
            for _, name in lookup["parts"]
            if name not in content["tables"]
        ),
        *(name for name in outputs if reference and name not in reference["tasks"]),
        *(name for name in features if reference and name not in reference["features"]),
    ]
    sequences = content.get("sequences")
    for group in [sequences["single"], *sequences["aligned"]] if sequences else []:
        unknown += [name for name in group if name not in features]
    if unknown or not outputs:
        raise UserError(
            f"{file}: '{shown(unknown[0]) if unknown else 'outputs'}' stands for nothing there, or for two "
            "things: package the checkpoint anew"
        )
    return manifest


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


def write_manifest(
    directory: Path, content: Mapping[str, Any], key: PrivateKey | None = None
) -> dict[str, Any]:
    """Write manifest.json with the digest of every other file in ``directory``, then its own digest, and its
    signature by ``key``."""
    for name in (MANIFEST, DIGEST, SIGNATURE):
        (directory / name).unlink(missing_ok=True)
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    digests = {str(file.relative_to(directory)): sha256(file) for file in files}
    manifest = {"format": FORMAT, "schema": SCHEMA, **content, "files": digests}
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).encode()
    (directory / MANIFEST).write_bytes(text)
    # As sha256sum writes and checks it.
    (directory / DIGEST).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")
    if key is not None:
        (directory / SIGNATURE).write_bytes(signed(key, text))
    for file in [
        *files,
        *(directory / name for name in (MANIFEST, DIGEST, SIGNATURE) if key or name != SIGNATURE),
    ]:
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
