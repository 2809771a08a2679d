"""The three comparisons: training speed, losses from the same weights, scoring speed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from roster import HERE, PEERS, REFERENCE, Places
from rounds import Result, in_turn, lines, result_of
from work import LEARNING_RATE, SETTINGS, write

SCORERS = {
    "eager TorchRec": (),
    "recpipe": ("--ours", "--as-run"),
    "recpipe_bf16": ("--ours", "--as-run", "--precision", "bfloat16"),
    "recpipe, process as is": ("--ours",),
    "recpipe_bf16, process as is": ("--ours", "--precision", "bfloat16"),
}
"""Arguments of inference.py; the first is the reference."""
AT_OTHER_SIZES = {
    "by hand, addmm": ("--hand",),
    "eager TorchRec": (),
    "recpipe": ("--ours", "--as-run"),
    "recpipe's package": ("--package",),
}
"""The same with ``--batches``."""

OPTIMIZERS = {
    "adagrad": (),
    "sgd": ("optim=sgd", f"optim.tables.lr={LEARNING_RATE}", f"optim.dense.lr={LEARNING_RATE}"),
}
"""Of the comparison of losses: by hand_dmp.py's name, recpipe's overrides."""


def training(
    directory: Path, setting: str, steps: int, repetitions: int, names: Sequence[str], places: Places
) -> dict[str, list[Result]]:
    """Every row's runs on ``steps`` batches of ``setting``; prints the table."""
    write(directory, setting, steps)
    commands = {name: places.command(PEERS[name], directory) for name in names}
    found = in_turn(commands, repetitions, REFERENCE)
    print(f"\n{setting}: {said(setting)}; {steps} steps, {repetitions} rounds")
    speeds = {name: [run["samples_per_second"] for run in runs] for name, runs in found.items()}
    print("\n".join(lines(speeds, REFERENCE)))
    for name, runs in found.items():
        if PEERS[name].project not in ("torchrec", "recpipe"):
            print(f"{name} on {', '.join(f'{k} {v}' for k, v in runs[-1]['versions'].items())}")
    sys.stdout.flush()
    return found


def losses(directory: Path, setting: str, steps: int, places: Places) -> dict[str, Result]:
    """Both sides' losses from the same weights, by optimizer, and how far they are apart.

    Adagrad's first steps move a weight by the whole learning rate however small its gradient is, so that
    rounding grows from step to step. The hand-written loop against itself, from weights that are one float32
    apart, tells how much; under SGD rounding stays what it is.
    """
    write(directory, setting, steps)
    print(f"\n{setting}: {said(setting)}; losses of {steps} steps from the same weights")
    print(f"{'largest relative difference to the loop by hand':<52} all steps   first 10")
    found = {}
    for optimizer, chosen in OPTIMIZERS.items():
        weights = str(directory / f"{optimizer}.safetensors")
        by_hand = [*places.command(PEERS[REFERENCE], directory), "--losses", "--optimizer", optimizer]
        script = [places.python("recpipe"), str(HERE / "recpipe_losses.py"), str(directory), weights]
        theirs = result_of([*by_hand, "--save", weights])["losses"]
        sides = {
            "recpipe": result_of([*script, *chosen])["losses"],
            "by hand from weights one rounding apart": result_of([*by_hand, "--nudge"])["losses"],
        }
        far = {side: differences(values, theirs) for side, values in sides.items()}
        for side, values in far.items():
            print(f"{f'{optimizer}, {side}':<52} {max(values):9.1e}  {max(values[:10]):9.1e}", flush=True)
        found[optimizer] = {"by hand": theirs, **sides, "differences": far}
    return found


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Relative, step by step; both sides must have made the same number of steps."""
    if len(ours) != len(theirs):
        sys.exit(f"recpipe made {len(ours)} steps, the hand-written loop {len(theirs)}")
    return [abs(mine - its) / abs(its) for mine, its in zip(ours, theirs, strict=True)]


def inference(
    directory: Path, setting: str, repetitions: int, batches: Sequence[int] | None = None
) -> dict[str, list[Result]]:
    """Every scorer's runs; prints a table for each batch size. ``batches``: sizes instead of the usual ones,
    beside a loop by hand and the package."""
    write(directory, setting, steps=20)
    script = str(HERE / "inference.py")
    scorers = SCORERS if batches is None else AT_OTHER_SIZES
    sizes = [] if batches is None else ["--batches", *map(str, batches)]
    commands = {
        name: [sys.executable, script, str(directory), *arguments, *sizes]
        for name, arguments in scorers.items()
    }
    first = next(iter(scorers))
    found = in_turn(commands, repetitions, first)
    for batch in found[first][0]["samples_per_second"]:
        print(f"\n{setting}: scoring batches of {batch}, {repetitions} rounds")
        speeds = {name: [r["samples_per_second"][batch] for r in runs] for name, runs in found.items()}
        print("\n".join(lines(speeds, first)), flush=True)
    return found


def said(setting: str) -> str:
    """A setting in words."""
    s = SETTINGS[setting]
    bottom, top = ("-".join(map(str, layers)) for layers in ((*s.bottom, s.dim), (*s.top, 1)))
    return f"dim {s.dim}, batch {s.batch}, bottom {bottom}, top {top}"
