"""Commands and moved names of installed packages."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from recpipe import commands, kit, plugin
from recpipe.cli import main
from recpipe.errors import UserError
from recpipe.plugin.errors import PluginLoadError


@pytest.fixture
def package(tmp_path: Path, monkeypatch):
    """``package(source, group, *lines)`` puts a module ``acme_doors`` on the path with entry points."""

    def install(source: str, group: str, *lines: str) -> None:
        (tmp_path / "acme_doors.py").write_text(source)
        info = tmp_path / "acme_doors-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-doors\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(importlib.sys.modules, "acme_doors", raising=False)

    return install


GREET = """
from recpipe.commands import Command
GREET = Command("acme_doors:greet", "WHO", "says hello")
def greet(words):
    print("hello", *words)
    return 0
"""


def test_a_packages_command_runs_and_is_in_the_help(package, capsys, monkeypatch) -> None:
    package(GREET, "recpipe.commands", "greet = acme_doors:GREET")
    assert commands.command("greet").run("greet", ["you"]) == 0
    assert capsys.readouterr().out == "hello you\n"
    monkeypatch.setattr("sys.argv", ["recpipe", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "recpipe greet WHO" in capsys.readouterr().out
    with pytest.raises(UserError, match="say recpipe greet WHO"):
        commands.command("greet").run("greet", [])
    with pytest.raises(UserError, match="Did you mean 'greet'"):
        commands.command("gret")


def test_own_commands_are_not_replaced(package) -> None:
    package(GREET, "recpipe.commands", "evaluate = acme_doors:GREET")
    assert commands.command("evaluate") is commands.COMMANDS["evaluate"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_module_there", "cannot be imported"),
        ("GREET = 3", "must be a recpipe.commands.Command"),
    ],
)
def test_a_broken_command_is_named_and_leaves_the_help(package, source: str, says: str) -> None:
    package(source, "recpipe.commands", "greet = acme_doors:GREET")
    with pytest.raises(PluginLoadError, match=says):
        commands.command("greet")
    assert says in commands.listed()
    assert "recpipe evaluate" in commands.listed()


@pytest.mark.parametrize("module", [kit, plugin])
def test_a_name_that_a_package_took_over_is_imported_from_there(package, module) -> None:
    package(
        "class Moved: pass\nNAMES = {'Flown': 'acme_doors:Moved'}", "recpipe.names", "x = acme_doors:NAMES"
    )
    with pytest.warns(DeprecationWarning, match=rf"{module.__name__}.Flown is acme_doors.Moved now"):
        found = module.Flown
    assert found.__module__ == "acme_doors"
    with pytest.raises(AttributeError, match="Nowhere"):
        _ = module.Nowhere
