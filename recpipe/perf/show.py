"""What a machine's profile says, as text."""

from __future__ import annotations

from recpipe.perf.machine import Machine
from recpipe.perf.profile import MachineProfile

GIGA = 1e9


def shown(profile: MachineProfile) -> str:
    """One screen: the host, the limits, and how many samples there are of each family."""
    host = profile.host
    lines = [
        f"{host.processor}, {host.cores} cores, {host.threads} threads, {host.instruction_set}, "
        f"{host.device}",
        f"torch {host.torch_version}, torchrec {host.torchrec_version}, fbgemm {host.fbgemm_version}",
        f"measured {profile.made}{', in the quick form' if profile.quick else ''}",
        "",
    ]
    limits = Machine.of(profile.samples.get("limits", ()), 64, host.threads)
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
    lines += [f"{name:<14}{len(samples):>6} samples" for name, samples in profile.samples.items()]
    return "\n".join(lines)
