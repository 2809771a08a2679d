"""What a machine's profile says, as text."""

from __future__ import annotations

from recpipe.profiling.limits import Limits
from recpipe_perf_model.kernels.models import FAMILIES, KernelModels
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.step.amounts import Amounts
from recpipe_perf_model.step.step import FAMILY, fitted_factors, told

GIGA = 1e9


def shown(profile: MachineProfile) -> str:
    """One screen: ``measured``, and how well kernels are predicted."""
    lines = [measured(profile)]
    if set(FAMILIES) <= profile.samples.keys():
        lines += ["", *held_out(KernelModels.of(profile))]
    return "\n".join(lines)


def measured(profile: MachineProfile) -> str:
    """The host, its limits, and how many samples there are of each family."""
    host = profile.host
    lines = [
        f"{host.processor}, {host.cores} cores, {host.threads} threads, {host.instruction_set}, "
        f"{host.device}",
        f"torch {host.torch_version}, torchrec {host.torchrec_version}, fbgemm {host.fbgemm_version}",
        f"measured {profile.made}{', in the quick form' if profile.quick else ''}",
        "",
    ]
    limits = Limits.of(profile.samples.get("limits", ()), 64, host.threads)
    if limits is not None:
        rates = ", ".join(f"{name} {rate / GIGA:.0f}" for name, rate in limits.gemm_flops_per_s.items())
        lines += [
            f"matrix products, GFLOP/s       {rates}",
            f"copy and read, GB/s            {limits.copy_bytes_per_s / GIGA:.1f}, "
            f"{limits.read_bytes_per_s / GIGA:.1f}",
            f"random rows of 64 bytes, GB/s  {limits.gather_bytes_per_s / GIGA:.2f}, in one thread "
            f"{limits.gather_bytes_per_s_one_thread / GIGA:.2f}",
            "",
        ]
    if {FAMILY, "lookups", *FAMILIES} <= profile.samples.keys():
        lines += [told(fitted_factors(profile, Amounts(profile))), ""]
    for name, samples in profile.samples.items():
        why = f", disturbed: {profile.disturbed[name]}" if name in profile.disturbed else ""
        lines.append(f"{name:<14}{len(samples):>6} samples{why}")
    return "\n".join(lines)


def held_out(models: KernelModels) -> list[str]:
    """The errors of kernel models on shapes that they were not fitted to, a line for each kind."""
    lines = [f"{'kernels, held out':<24}{'samples':>8}{'GMAE':>8}{'MAPE':>8}{'p90':>8}"]
    for kind, found in models.held_out().items():
        lines.append(f"{kind:<24}{found.count:>8}{found.gmae:>8.1%}{found.mape:>8.1%}{found.p90:>8.1%}")
    return lines
