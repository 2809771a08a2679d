"""The commands beside training: ``recpipe NAME ARGUMENTS``.

recpipe's own are the lines of ``COMMANDS``. Packages bring theirs by the entry point group
``recpipe.commands``, each a ``Command`` in a module that imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recpipe.common.process import imported_from, importing
from recpipe.errors import UserError, did_you_mean
from recpipe.plugin.errors import PluginError, PluginLoadError
from recpipe.plugin.offers import entry, imported, offered, origin_of


@dataclass(frozen=True)
class Command:
    """One command. ``where``: ``module:function``, imported when it is called, since torch takes seconds.

    The function gets the words after the command's name and returns the exit status.
    """

    where: str
    arguments: str
    """What follows its name, for help and errors; empty: it takes nothing."""
    says: str
    """What it does, for help."""
    python: str = ""
    """``module:function`` for a call from Python, of a ``recpipe.answers.command.Caller``, the checkpoint and
    the other words; empty: there is none."""

    def run(self, name: str, words: Sequence[str]) -> int:
        """Carry it out; ``UserError`` for words that it does not take."""
        least = sum(word[0].isupper() for word in self.arguments.split())
        if words and not self.arguments:
            raise UserError(f"recpipe {name} takes no arguments, not '{words[0]}'")
        # A word that should be a file or a folder and looks like an option or an override.
        option = any(w.startswith("-") or ("=" in w and not Path(w).exists()) for w in words[:least])
        too_many = len(words) > least and not any(mark in self.arguments for mark in ("=", "--", "["))
        if too_many or len(words) < least or option:
            raise UserError(f"say recpipe {name} {self.arguments}")
        try:
            with importing():
                called: Callable[[Sequence[str]], int] = imported_from(self.where)
        except OSError:  # a library that does not load
            from recpipe.tasks.doctor import check_versions

            check_versions()  # says why
            raise
        return called(words)


COMMANDS = {
    "schema": Command(
        "recpipe.tasks.schema:schema",
        "FILES [label=COLUMN] [weight=COLUMN] [output=features.yaml] [sample=ROWS] [overwrite=true]",
        "what unknown files hold, and a proposal of their features with a reason for each",
    ),
    "evaluate": Command(
        "recpipe.answers.command:evaluate",
        "CHECKPOINT [data=...] [data.path=...] [split=eval] [by=COLUMN]",
        "its quality on any data: AUC, logloss, NE, calibration",
    ),
    "predict": Command(
        "recpipe.answers.command:predict",
        "CHECKPOINT [data=...] [data.path=...] output=FILE.parquet [keys=[a,b]]",
        "a score for each row of any data",
    ),
    "package": Command(
        "recpipe.answers.package:package_command",
        "CHECKPOINT DIRECTORY [instruction_set=avx2] [reference=SAMPLES] [popularity=true] [sign=KEY] "
        "[overwrite=true] [effects=RUN] [shards=N]",
        "what a server needs of it, compiled, in one directory",
    ),
    "apply": Command(
        "recpipe.answers.apply:apply_command",
        "BASE DELTA... [out=DIRECTORY] [trust=PUBKEY] [sign=KEY] [overwrite=true]",
        "the package of a later step: a package, and the deltas that a run has published since",
    ),
    "log": Command(
        "recpipe.answers.apply:log_command",
        "PACKAGE [DIRECTORY]",
        "the deltas that follow a package: their steps, times, rows and bytes",
    ),
    "plugins": Command(
        "recpipe.tasks.plugins:plugins",
        "[new kind name]",
        "what is installed and which extension points each uses; new: writes a package to begin with",
    ),
    "unshard": Command(
        "recpipe.answers.plain:unshard_command",
        "CHECKPOINT FILE.safetensors [overwrite=true]",
        "its tables and dense parameters in one file",
    ),
    "sweep-report": Command(
        "recpipe.report.sweep:report_command",
        "DIR",
        "the table with which a sweep ends, again, from its jobs' reports",
    ),
    "doctor": Command(
        "recpipe.tasks.doctor:print_findings", "", "do the installed torch, torchrec and fbgemm fit together"
    ),
}


def command(name: str) -> Command:
    """The command ``name``; ``UserError`` with the nearest name if there is none, ``PluginError`` if its
    package is broken."""
    if name in COMMANDS:
        return COMMANDS[name]
    available = offered("command")
    if name not in available:
        known = [*COMMANDS, *available]
        raise UserError(
            f"no command '{name}'.{did_you_mean(name, known)} Commands: {', '.join(known)}; a recipe is "
            "set by key=value (see --help)"
        )
    ep = entry("command", name, available)
    found = imported("command", ep)
    if not isinstance(found, Command):
        raise PluginLoadError(
            f"command {origin_of(ep)}: '{ep.value}' must be a recpipe.commands.Command; correct its "
            "entry point"
        )
    return found


def listed() -> str:
    """The commands for the help, two lines for one whose first is long."""
    lines = []
    for name in [*COMMANDS, *(name for name in offered("command") if name not in COMMANDS)]:
        try:
            found = command(name)
        except PluginError as fault:  # a broken package must not take the help away
            found = Command("", "", str(fault))
        first = f"  python -m recpipe {name} {found.arguments}".rstrip()
        lines += [f"{first:<44} {found.says}"] if len(first) < 44 else [first, f"{'':<44} {found.says}"]
    return "\n".join(lines)
