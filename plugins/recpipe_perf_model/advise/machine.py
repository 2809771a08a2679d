"""The machine that ``task=advise`` advises for: its profile, and what it would be with faster parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from recpipe.common.console import log
from recpipe.errors import UserError, nearest_or_all
from recpipe_perf_model.calibrate import calibrate, with_ranks
from recpipe_perf_model.machine import Host, MachineProfile, own_profile, profile_path
from recpipe_perf_model.step.factors import FAMILY as STEPS

NEEDED = ("limits", "gemm", "pointwise", "overheads", "lookups", "tiers", "stores", "steps")
"""Families of measurements that predictions for a CPU are made of."""
BESIDE = ("rows", "collectives")
"""Those that only predictions for several ranks, and of tables with rows as plain arrays, are made of."""
DISK = "disk"
"""The what-if for waiting for an ssd store; what the processor does for it stays as it is."""


def machine_profile(given: str | None, device: torch.device, ranks: int = 1) -> MachineProfile:
    """The profile in the file ``given``, of any machine; or this machine's, measured in the quick form if it
    is not known. A family that it lacks, or messages between so many ``ranks``, are measured, too."""
    host = Host.current(device)
    if given is not None:
        profile = MachineProfile.load(Path(given).expanduser())
        if profile.host.device != "cpu":
            raise UserError(
                f"advise.machine={given} is of a GPU ({profile.host.device}), and task=advise predicts "
                "training on a CPU: give the profile of a CPU, or predict a GPU on paper with task=scale"
            )
        lacking = [name for name in NEEDED if name not in profile.samples]
        lacking += [name for name in BESIDE if ranks > 1 and not profile.samples.get(name)]
        if lacking:
            raise UserError(
                f"advise.machine={given} lacks {', '.join(lacking)}: run recpipe perf calibrate on that "
                "machine once more"
            )
        return profile
    found, whole = own_profile(host), (*NEEDED, *BESIDE)
    if found is None or any(name not in found.samples for name in whole):
        log.info("measuring this machine once; recpipe perf calibrate does it more closely")
        found = calibrate(profile_path(host), quick=found is None or found.quick, only=whole)
    if ranks > 1 and not any(sample.at.get("ranks") == ranks for sample in found.samples[BESIDE[1]]):
        log.info("measuring messages between %d ranks once", ranks)
        found = with_ranks(profile_path(host), ranks, quick=found.quick)
    return found


def words(profile: MachineProfile, device: torch.device, given: str | None) -> str:
    """The profile's machine, and in what it is not this one."""
    host = profile.host
    text = f"{host.processor}, {host.instruction_set}, {host.threads} threads of {host.cores} cores"
    text += ", measured in the quick form" if profile.quick else ""
    if profile.disturbed:
        text += (
            f", while {next(iter(profile.disturbed.values()))} (not kept: measure it again when it is quiet)"
        )
    differences = Host.current(device).differs(host)
    if given is None or not differences:
        return text
    return f"{text}, from {given}, which is not this one ({'; '.join(differences)})"


def faster(profile: MachineProfile, what: str, times: float) -> MachineProfile:
    """``profile`` of a machine on which a family or a kind of its measurements, or ``DISK``, takes so many
    times less time."""
    parts = {family: samples for family, samples in profile.samples.items() if family != STEPS}
    kinds = {sample.kind for samples in parts.values() for sample in samples}
    known = [DISK, *parts, *sorted(kinds)]
    if what not in known:
        raise UserError(f"advise.what_if: {what} is nothing that is measured. {nearest_or_all(what, known)}")

    def is_meant(family: str, kind: str) -> bool:
        disk = what == DISK and kind.startswith("ssd ") and not kind.endswith(" busy")
        return disk or what in (family, kind)

    return replace(
        profile,
        samples={
            family: tuple(
                replace(sample, seconds=sample.seconds / times) if is_meant(family, sample.kind) else sample
                for sample in samples
            )
            for family, samples in profile.samples.items()
        },
    )
