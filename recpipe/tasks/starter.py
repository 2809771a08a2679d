"""``recpipe plugins new KIND NAME``: a whole package, made of the example of the kind's page."""

from __future__ import annotations

import re
from pathlib import Path

from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.plugin.offers import GROUPS, PLUGIN, is_offered

TEMPLATES = Path(__file__).parent / "starters"
HERE = "@NAME@"
"""What stands for the package's name in a template."""
MADE = {
    "planner": "Spread",
    "cache": "TinyLfu",
    "splitter": "Warm",
    "skipper": "SkipSmall",
    "quantizer": "HalfCold",
    "model": "FactorizationMachine",
    "data": "open_clicks",
    "task": "skew",
}
"""What the entry point of each kind names in the package."""
PROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "recpipe-@NAME@"
version = "0.1.0"
dependencies = ["recpipe>=0.1,<1"]

[project.entry-points."{group}"]
@NAME@ = "recpipe_@NAME@:{made}"
"""
README = """\
# recpipe-@NAME@

A {kind} for recpipe. It begins as the example of recpipe's page about this kind
(docs/plugins/{kind}.md), which explains it; change it to what you need.

```sh
pip install -e .
recpipe plugins
python -m recpipe {word}
python -m pytest tests
```
"""


def starter(kind: str, name: str) -> dict[str, str]:
    """The files of a package that offers a ``kind`` called ``name``, by their path in it.

    ``UserError`` for another kind or a name that no package can have.
    """
    if kind not in MADE:
        raise UserError(f"no kind '{shown(kind)}': {nearest_or_all(kind, MADE)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise UserError(f"'{shown(name)}' is no name: a lower-case letter, then such letters, digits and _")
    group = kind if kind in GROUPS else PLUGIN

    def read(template: str) -> str:
        return (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")

    word = f"+plugin={name}" if group == PLUGIN else f"{group}={name}"
    files = {
        "pyproject.toml": PROJECT.format(group=GROUPS[group], made=MADE[kind]),
        "README.md": README.format(kind=kind, word=word),
        f"recpipe_{name}/__init__.py": read(f"{kind}.py"),
        f"recpipe_{name}/conf/{group}/{name}.yaml": read(f"{kind}.yaml"),
        f"tests/test_{name}.py": read(f"{group}.test"),
    }
    return {file: text.replace(HERE, name) for file, text in files.items()}


def write_starter(kind: str, name: str) -> Path:
    """Write the package into the folder ``recpipe-NAME`` here; ``UserError`` if it or the name is taken."""
    files, folder = starter(kind, name), Path(f"recpipe-{name}")
    group = kind if kind in GROUPS else PLUGIN
    if is_offered(group, name):
        raise UserError(f"something installed offers a {group} named '{name}' already: choose another name")
    if folder.exists():
        raise UserError(f"{folder} is there already: choose another name, or move it away")
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
