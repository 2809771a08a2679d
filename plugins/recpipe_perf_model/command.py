"""``recpipe perf``: measures this machine, and shows what is known about it."""

from __future__ import annotations

from collections.abc import Sequence

from recpipe.backend.allocator import bound_kernel_caches, tune_allocator
from recpipe.commands import Command
from recpipe.common.console import alone, capture_logs
from recpipe.common.process import calm_threads, quieted
from recpipe.errors import UserError

PERF = Command(
    "recpipe_perf_model.command:perf",
    "calibrate [--quick] | show",
    "what this machine can do, measured once for predictions; takes minutes, --quick one",
)

USAGE = "say recpipe perf calibrate [--quick], or recpipe perf show"


def perf(words: Sequence[str]) -> int:
    """``calibrate [--quick]``: measure what is not known yet. ``show``: what is known, in one screen."""
    match list(words):
        case ["calibrate"] | ["calibrate", "--quick"]:
            return _calibrate("--quick" in words)
        case ["show"]:
            return _show()
    raise UserError(USAGE if not words else f"{USAGE}, not 'recpipe perf {' '.join(words)}'")


def _calibrate(quick: bool) -> int:
    # As in a run, and before torch is loaded.
    calm_threads()
    tune_allocator()
    bound_kernel_caches()
    from recpipe.distributed.launch import ProcessRank as Process
    from recpipe_perf_model.calibrate import calibrate
    from recpipe_perf_model.machine import Host, profile_path
    from recpipe_perf_model.show import measured

    if Process.current().world > 1:
        raise UserError("recpipe perf calibrate starts its ranks itself: run it without torchrun")
    path = profile_path(Host.current())
    with quieted(), alone(), capture_logs(None):
        profile = calibrate(path, quick)
    print(f"\n{measured(profile)}\n\nthis machine's profile: {path}")
    if profile.disturbed:
        why = "; ".join(f"{name}: {said}" for name, said in profile.disturbed.items())
        raise UserError(
            f"not kept, because the machine was not quiet: {why}. Run recpipe perf calibrate again when it "
            "is, or with RECPIPE_BUSY=keep on one that never is"
        )
    print("how well kernels are predicted with it: recpipe perf show")
    return 0


def _show() -> int:
    from recpipe_perf_model.machine import Host, own_profile
    from recpipe_perf_model.show import shown

    profile = own_profile(Host.current())
    if profile is None:
        raise UserError(
            "this machine has not been measured with these versions and threads; run recpipe perf calibrate"
        )
    print(shown(profile))
    return 0
