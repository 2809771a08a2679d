"""``recpipe deploy PACKAGE DIRECTORY for=triton``: lays a package out for another server."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recpipe.common.console import alone, capture_logs
from recpipe.common.files import unwritable
from recpipe.common.process import quieted
from recpipe.common.validation import Positive, Text, typed
from recpipe.errors import UserError, did_you_mean, shown

log = logging.getLogger("recpipe")
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass
class DeployConfig:
    """The words of ``recpipe deploy`` beside ``for``."""

    name: Text | None = None
    """The model's name; None: the package's directory, without its ending."""
    threads: Positive = 1
    """Threads that score a request."""


def deploy_command(words: Sequence[str]) -> int:
    """``recpipe deploy PACKAGE DIRECTORY for=triton|torchserve|kserve|onnx [name=...] [threads=1]``."""
    if len(words) < 2:
        raise UserError("say recpipe deploy PACKAGE DIRECTORY for=triton")
    package, into = (Path(word).expanduser() for word in words[:2])
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(words[2:])))
    except (OmegaConfBaseException, ValueError) as fault:
        raise UserError(f"recpipe deploy takes key=value, not '{shown(' '.join(words[2:]), 100)}'") from fault
    wanted = values.pop("for", None)
    known = [own.name for own in fields(DeployConfig)]
    wrong = next((key for key in values if key not in known), None)
    if wrong is not None:
        hint = did_you_mean(wrong, ["for", *known])
        raise UserError(f"recpipe deploy has no {shown(wrong)}; it has for, {', '.join(known)}.{hint}")
    with quieted(), alone(), capture_logs(None):
        deploy(package, into, wanted, typed(DeployConfig, values, "deploy"))
    return 0


def deploy(package: Path, into: Path, wanted: object, config: DeployConfig) -> None:
    """Lay ``package`` out in ``into`` for the server ``wanted``; ``UserError`` if it is no whole package, if
    the place is taken, or if that server cannot be given all of it."""
    from recpipe.answers.manifest import RETRIEVAL, read_manifest
    from recpipe_serve.deploy.layouts import LAYOUTS

    if not isinstance(wanted, str) or wanted not in LAYOUTS:
        raise UserError(f"for={shown(wanted)}: a package is laid out for {', '.join(LAYOUTS)}")
    manifest = read_manifest(package)
    name = config.name or package.resolve().name.partition(".")[0]
    if not NAMES.fullmatch(name):
        raise UserError(f"name={shown(name)} is no name of a model: letters, digits, dots, - and _")
    if wanted in ("triton", "torchserve") and RETRIEVAL in manifest:
        raise UserError(
            f"{package} finds candidates, which recpipe serve alone does: package the ranker without index="
        )
    place = into / name if wanted == "triton" else into
    if place.exists():
        raise UserError(f"{place} exists already: name another directory, or remove it")
    try:
        LAYOUTS[wanted](package, manifest, into, name, config.threads)
    except OSError as fault:
        shutil.rmtree(place, ignore_errors=True)
        raise unwritable(place, fault) from fault
    log.info("laid '%s' out for %s in %s", name, wanted, into)
