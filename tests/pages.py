"""Packages as pages of docs/ write them: a line with a file's name in backticks, then its code block."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def files_of(page: Path) -> dict[str, str]:
    """The files that ``page`` shows, by name."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def write_site(page: Path, site: Path) -> dict[str, str]:
    """The package that ``page`` shows, in ``site`` as pip would install it; its files by name."""
    files = files_of(page)
    for name, code in files.items():
        file = site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code, encoding="utf-8")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    name, version = project["name"], project["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items()) for group, names in groups.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    return files


@contextmanager
def installed_from(page: Path, site: Path) -> Iterator[dict[str, str]]:
    """In this process the package that ``page`` shows can be found and imported; its files by name."""
    site.mkdir()
    files = write_site(page, site)
    with importable(site):
        yield files


@contextmanager
def importable(site: Path) -> Iterator[None]:
    """In this process the packages in the folder ``site`` can be found and imported."""
    packages = {path.name for path in site.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        yield
    for module in [module for module in sys.modules if module.partition(".")[0] in packages]:
        del sys.modules[module]
