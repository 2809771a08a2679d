"""The house as docs/house.md draws it: every room on the page, and imports in the page's order alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSE = ROOT / "recpipe"
PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
ROOMS = re.findall(r"^\| `(\w+(?:\.py)?)` \| (.+) \|$", PAGE, re.MULTILINE)
"""The table's rows: a room or a loose file, and its sentence; from the first to the last."""
ORDER = [name for name, _ in ROOMS]
MODEL = re.findall(r"^\| `recpipe_perf_model/(\w+(?:\.py)?)` \| (.+) \|$", PAGE, re.MULTILINE)
"""The same of the performance model."""
ORDERS = {"recpipe": ORDER, "recpipe_perf_model": [name for name, _ in MODEL]}
"""By package."""


def entered(name: str, package: str = "recpipe") -> str:
    """The room of ``package`` that an import of ``recpipe.x.y`` enters."""
    first = name.removeprefix(package)[1:].partition(".")[0]
    return first if (folder(package) / first).is_dir() and first else f"{first or '__init__'}.py"


def folder(package: str) -> Path:
    return HOUSE if package == "recpipe" else ROOT / "plugins" / package


def names_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported(tree: ast.AST, types: bool = True) -> Iterator[str]:
    """Modules of recpipe that code imports, within functions and, unless ``types`` is False, for annotations
    too."""
    for node in ast.iter_child_nodes(tree):
        if names_types_only(node) and not types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == "recpipe":
            yield from (
                f"recpipe.{alias.name}" if is_module(alias.name) else "recpipe" for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        yield from imported(node, types)


def is_module(name: str) -> bool:
    return (HOUSE / name).is_dir() or (HOUSE / f"{name}.py").is_file()


def entries(source: str, package: str = "recpipe", types: bool = True) -> set[str]:
    """Rooms of ``package`` that a file with this ``source`` enters."""
    names = set(imported(ast.parse(source), types))
    return {entered(name, package) for name in names if f"{name}.".startswith(f"{package}.")}


def too_late(source: str, own: str, package: str = "recpipe") -> set[str]:
    """Rooms of ``package`` that code in its room ``own`` enters and may not."""
    order = ORDERS[package]
    return {room for room in entries(source, package) if order.index(room) > order.index(own)}


@pytest.mark.parametrize("package", ORDERS)
def test_every_room_and_loose_file_is_on_the_page_and_no_other(package: str) -> None:
    home = folder(package)
    rooms = {path.name for path in home.iterdir() if path.is_dir() and any(path.glob("*.py"))} - {"tests"}
    assert sorted(ORDERS[package]) == sorted(rooms | {path.name for path in home.glob("*.py")})


def test_each_has_one_sentence() -> None:
    for name, sentence in (*ROOMS, *MODEL):
        assert re.fullmatch(r"[^.]([^.]|\.(?! ))*\.", sentence), f"{name}: {sentence}"


def test_the_picture_has_every_room_once() -> None:
    picture = PAGE.partition("```text\n")[2].partition("```")[0].partition("┌")[2]
    words = re.findall(r"[\w.]+", picture.replace(":", " "))
    for name in ORDER:
        assert words.count(name) == 1, name


@pytest.mark.parametrize(
    ("package", "room"), [(package, room) for package, order in ORDERS.items() for room in order]
)
def test_imports_go_in_the_pages_order(package: str, room: str) -> None:
    home = folder(package) / room
    files = [home] if room.endswith(".py") else sorted(home.rglob("*.py"))
    assert files
    for file in files:
        late = too_late(file.read_text(encoding="utf-8"), room, package)
        assert not late, (
            f"{file.relative_to(ROOT)} imports {', '.join(sorted(late))}, below {room} on the page"
        )


@pytest.mark.parametrize(
    ("line", "room"),
    [
        ("import recpipe.run", "run.py"),
        ("from recpipe import private_api", "private_api"),
        ("from recpipe import __version__", "__init__.py"),
        ("from recpipe.tables import build", "tables"),
        ("def f():\n    from recpipe.tasks.plan import plan", "tasks"),
        ("if TYPE_CHECKING:\n    import recpipe.cli", "cli.py"),
    ],
)
def test_what_an_import_enters(line: str, room: str) -> None:
    assert entries(line) == {room}


def test_an_import_of_a_later_room_is_found() -> None:
    assert too_late("def later():\n    import recpipe.tasks.plan", "data") == {"tasks"}
    assert too_late("if TYPE_CHECKING:\n    import recpipe.tasks.plan", "data") == {"tasks"}
    assert not too_late("from recpipe.plugin.batch import Batch", "tasks")
    package = "recpipe_perf_model"
    assert too_late(f"from {package}.tiers.predict import Kind", "facts", package) == {"tiers"}
    assert not too_late(f"from {package}.step.walk import walk", "scale", package)


def test_core_imports_no_plugin() -> None:
    plugins = {path.name for path in (ROOT / "plugins").iterdir()}
    for file in HOUSE.rglob("*.py"):
        found = {name.split(".")[0] for name in imported(ast.parse(file.read_text(encoding="utf-8")))}
        assert not found & plugins, file
