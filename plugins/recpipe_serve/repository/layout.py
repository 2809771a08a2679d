"""A repository of models as Triton has them: ``DIRECTORY/NAME/VERSION`` is a package, and
``DIRECTORY/NAME/routes.yaml`` says, if it is there, which version answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, Interval
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recpipe.answers.score import MANIFEST
from recpipe.common.validation import Positive, typed
from recpipe.errors import UserError, did_you_mean, shown

ROUTES = "routes.yaml"
LATEST = "latest"
"""In the place of a version: the largest number that is there."""


@dataclass(frozen=True)
class Share:
    """A version, and the share of requests that it has."""

    version: Positive
    share: Annotated[float, Gt(0), Interval(le=1)]


@dataclass(frozen=True)
class Routes:
    """Where requests go that name no version."""

    version: Positive
    """Answers them."""
    canary: Share | None = None
    """Answers some in its place."""
    shadow: Share | None = None
    """Scores some of those that ``version`` answers as well; clients see nothing of it."""
    also: tuple[int, ...] = ()
    """Other versions, that answer who asks for them by their number."""

    @property
    def served(self) -> list[int]:
        """All versions that are loaded, ascending."""
        shares = [own.version for own in (self.canary, self.shadow) if own is not None]
        return sorted({self.version, *shares, *self.also})


@dataclass(frozen=True)
class ModelFolder:
    """A model in a repository."""

    name: str
    versions: Mapping[int, Path] = field(default_factory=dict)
    """All that are there."""
    routes: Routes = field(default_factory=lambda: Routes(1))


def is_repository(directory: Path) -> bool:
    """Whether ``directory`` holds models by name and version, and is no package itself."""
    return not (directory / MANIFEST).exists() and any(map(_versions, _folders(directory)))


def read_repository(directory: Path) -> dict[str, ModelFolder]:
    """The models in ``directory`` by their names; ``UserError`` for ``routes.yaml`` that do not fit."""
    found = {folder.name: _versions(folder) for folder in _folders(directory)}
    return {name: read_model(directory, name) for name, versions in found.items() if versions}


def read_model(directory: Path, name: str) -> ModelFolder:
    """The model ``name`` in ``directory``; ``UserError`` if there is none."""
    folder = directory / name
    versions = _versions(folder) if folder in _folders(directory) else {}
    if not versions:
        raise UserError(f"{directory} has no model '{shown(name)}': put packages at {shown(name)}/VERSION")
    return ModelFolder(name, versions, _routes(folder / ROUTES, versions))


def _folders(directory: Path) -> list[Path]:
    hidden = (".", "_")
    return (
        sorted(own for own in directory.iterdir() if own.is_dir() and not own.name.startswith(hidden))
        if (directory.is_dir())
        else []
    )


def _versions(folder: Path) -> dict[int, Path]:
    """Packages by their numbers, ascending."""
    found = {}
    for own in _folders(folder):
        number = own.name
        if (
            number.isascii()
            and number.isdecimal()
            and not number.startswith("0")
            and (own / MANIFEST).exists()
        ):
            found[int(number)] = own
    return dict(sorted(found.items()))


def _routes(file: Path, versions: Mapping[int, Path]) -> Routes:
    latest = max(versions)
    if not file.exists():
        return Routes(latest)
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{file} cannot be read: {shown(fault, 200)}") from fault
    known = [own.name for own in fields(Routes)]
    if not isinstance(values, dict) or any(key not in known for key in values):
        wrong = next((key for key in values if key not in known), "") if isinstance(values, dict) else ""
        raise UserError(
            f"{file}: it has {', '.join(known)}, not '{shown(wrong)}'.{did_you_mean(wrong, known)}"
        )
    if values.get("version", LATEST) == LATEST:
        values["version"] = latest
    for key in ("canary", "shadow"):
        if values.get(key) is not None:
            values[key] = typed(Share, values[key], f"{file}: {key}")
    also = values.get("also") or []
    if not isinstance(also, list) or not all(type(own) is int for own in also):
        raise UserError(f"{file}: also={shown(also)} is no list of versions")
    version = typed(_Version, {"version": values["version"]}, str(file)).version
    found = Routes(version, values.get("canary"), values.get("shadow"), tuple(also))
    for number in found.served:
        if number not in versions:
            there = ", ".join(map(str, versions))
            raise UserError(f"{file}: version {number} is not there; there are {there}")
    for key in ("canary", "shadow"):
        share = getattr(found, key)
        if share is not None and share.version == version:
            raise UserError(f"{file}: {key} is version {version}, which answers anyway; name another one")
    return found


@dataclass(frozen=True)
class _Version:
    version: Positive
