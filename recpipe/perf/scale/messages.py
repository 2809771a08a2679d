"""The times of messages between GPUs on paper: all-to-alls and all-reduces, within hosts and between them."""

from __future__ import annotations

from recpipe.perf.scale.work import Training


def all_to_all(training: Training, near: float, far: float) -> float:
    """The seconds of an all-to-all in which the GPU that sends most sends ``near`` bytes within its host and
    ``far`` to other hosts; both go at the same time."""
    if training.gpus == 1:
        return 0.0
    curves = training.machine.curves
    within = curves["alltoall"].seconds(near)
    return max(within, curves["network"].seconds(far) if training.hosts > 1 else 0.0)


def even_all_to_all(training: Training, sent: float) -> float:
    """The same for ``sent`` bytes to all others alike."""
    others = max(1, training.gpus - 1)
    near = sent * (training.host_gpus - 1) / others
    return all_to_all(training, near, sent - near)


def all_reduce(training: Training, count: float) -> float:
    """The seconds to add up a buffer of ``count`` bytes of every GPU: within hosts, and for a share of it on
    each GPU between hosts."""
    if training.gpus == 1 or count <= 0:
        return 0.0
    curves, hosts, within = training.machine.curves, training.hosts, training.host_gpus
    near = curves["allreduce"].seconds(count) if within > 1 else 0.0
    far = 2 * count * (hosts - 1) / hosts / within
    return near + (curves["network"].seconds(far) if hosts > 1 else 0.0)
