"""The three comparisons: training speed, losses from the same weights, scoring speed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from roster import HERE, PEERS, REFERENCE, Places
from rounds import Result, in_turn, last_line, lines
from work import SETTINGS, write

SCORERS = {
    "eager TorchRec": (),
    "recpipe": ("--ours", "--as-run"),
    "recpipe_bf16": ("--ours", "--as-run", "--precision", "bfloat16"),
    "recpipe, process as is": ("--ours",),
    "recpipe_bf16, process as is": ("--ours", "--precision", "bfloat16"),
}
"""Arguments of inference.py; the first is the reference."""


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


def losses(directory: Path, setting: str, steps: int, places: Places, *overrides: str) -> Result:
    """Both sides' losses from the hand-written side's first weights, and how far they are apart."""
    write(directory, setting, steps)
    weights = str(directory / "weights.safetensors")
    theirs = last_line([*places.command(PEERS[REFERENCE], directory), "--weights", weights])["losses"]
    script = str(HERE / "recpipe_losses.py")
    ours = last_line([places.python("recpipe"), script, str(directory), weights, *overrides])["losses"]
    far = differences(ours, theirs)
    worst = max(range(len(far)), key=far.__getitem__)
    print(f"\n{setting}: {said(setting)}; losses of {len(far)} steps from the same weights")
    print(f"by hand {theirs[0]:.6f} .. {theirs[-1]:.6f}, recpipe {ours[0]:.6f} .. {ours[-1]:.6f}")
    print(f"largest relative difference: {far[worst]:.2g} (step {worst + 1})", flush=True)
    return {"by_hand": theirs, "recpipe": ours, "largest": far[worst]}


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Relative, step by step; both sides must have made the same number of steps."""
    if len(ours) != len(theirs):
        sys.exit(f"recpipe made {len(ours)} steps, the hand-written loop {len(theirs)}")
    return [abs(mine - its) / abs(its) for mine, its in zip(ours, theirs, strict=True)]


def inference(directory: Path, setting: str, repetitions: int) -> dict[str, list[Result]]:
    """Every scorer's runs; prints a table for each batch size."""
    write(directory, setting, steps=20)
    script = str(HERE / "inference.py")
    commands = {
        name: [sys.executable, script, str(directory), *arguments] for name, arguments in SCORERS.items()
    }
    first = next(iter(SCORERS))
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
