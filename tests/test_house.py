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


def room_of(file: Path) -> str:
    """The name of a file's room; of a loose file its own."""
    return file.relative_to(HOUSE).parts[0]


def entered(name: str) -> str:
    """The room that an import of ``recpipe.x.y`` enters."""
    first = name.partition(".")[2].partition(".")[0]
    return first if (HOUSE / first).is_dir() and first else f"{first or '__init__'}.py"


def names_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of recpipe that run-time code imports, within functions too."""
    for node in ast.iter_child_nodes(tree):
        if names_types_only(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module == "recpipe":
            yield from (
                f"recpipe.{alias.name}" if is_module(alias.name) else "recpipe" for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        yield from imported(node)


def is_module(name: str) -> bool:
    return (HOUSE / name).is_dir() or (HOUSE / f"{name}.py").is_file()


def entries(source: str) -> set[str]:
    """Rooms that a file with this ``source`` enters."""
    names = set(imported(ast.parse(source)))
    return {entered(name) for name in names if name.split(".")[0] == "recpipe"}


def too_late(source: str, own: str) -> set[str]:
    """Rooms that code in the room ``own`` enters and may not."""
    return {room for room in entries(source) if ORDER.index(room) > ORDER.index(own)}


def test_every_room_and_loose_file_is_on_the_page_and_no_other() -> None:
    rooms = {path.name for path in HOUSE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert sorted(ORDER) == sorted(rooms | {path.name for path in HOUSE.glob("*.py")})


def test_each_has_one_sentence() -> None:
    for name, sentence in ROOMS:
        assert re.fullmatch(r"[^.]([^.]|\.(?! ))*\.", sentence), f"{name}: {sentence}"


def test_the_picture_has_every_room_once() -> None:
    picture = PAGE.partition("```text\n")[2].partition("```")[0].partition("┌")[2]
    words = re.findall(r"[\w.]+", picture.replace(":", " "))
    for name in ORDER:
        assert words.count(name) == 1, name


@pytest.mark.parametrize("room", ORDER)
def test_imports_go_in_the_pages_order(room: str) -> None:
    files = [HOUSE / room] if room.endswith(".py") else sorted((HOUSE / room).rglob("*.py"))
    assert files
    for file in files:
        late = too_late(file.read_text(encoding="utf-8"), room)
        assert not late, (
            f"{file.relative_to(ROOT)} imports {', '.join(sorted(late))}, below {room} on the page"
        )


@pytest.mark.parametrize(
    ("line", "room"),
    [
        ("import recpipe.run", "run.py"),
        ("from recpipe import seams", "seams"),
        ("from recpipe import __version__", "__init__.py"),
        ("from recpipe.tables import build", "tables"),
        ("def f():\n    from recpipe.tasks.plan import plan", "tasks"),
        ("if TYPE_CHECKING:\n    import recpipe.cli", None),
    ],
)
def test_what_an_import_enters(line: str, room: str | None) -> None:
    assert entries(line) == ({room} if room else set())


def test_an_import_of_a_later_room_is_found() -> None:
    assert too_late("def later():\n    import recpipe.tasks.plan", "data") == {"tasks"}
    assert not too_late("from recpipe.data.batch import Batch", "tasks")


def test_core_imports_no_plugin() -> None:
    plugins = {path.name for path in (ROOT / "plugins").iterdir()}
    for file in HOUSE.rglob("*.py"):
        found = {name.split(".")[0] for name in imported(ast.parse(file.read_text(encoding="utf-8")))}
        assert not found & plugins, file
