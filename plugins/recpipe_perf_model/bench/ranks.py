"""What runs of several ranks take beside their own work, measured between processes of this machine.

    torchrun --standalone --nproc-per-node=2 -m recpipe_perf_model.bench.ranks FILE [--quick]

Each has one thread, as torchrun gives it. Messages go over the loopback device, which is no network: what a
network adds is for the prediction to say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from recpipe.common.console import log
from recpipe.profiling.limits import Sample
from recpipe_perf_model.bench import collectives, side

RANKS = 2
LIMIT = 120.0
"""Seconds after which the processes are ended; they take a tenth of that."""


def measure(quick: bool, ranks: int = RANKS) -> Iterator[Sample]:
    """Samples of collectives and of sharded steps between ``ranks`` new processes; none, with a warning,
    where they cannot be started."""
    with tempfile.TemporaryDirectory(prefix="recpipe-perf-") as folder:
        file = Path(folder) / "samples.json"
        start = f"-m torch.distributed.run --standalone --nproc-per-node={ranks} -m {__name__}"
        command = [sys.executable, *start.split(), str(file), *(["--quick"] if quick else [])]
        own = {key: value for key, value in os.environ.items() if key not in _OF_A_RUN}
        try:
            done = subprocess.run(
                command, env=own | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            log.warning("messages between ranks were not measured: it took more than %.0f s", LIMIT)
            return
        if done.returncode or not file.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines()
            last = said[-1][:200] if said else "no output"
            log.warning("messages between ranks were not measured: %s", last)
            return
        for each in json.loads(file.read_text()):
            yield Sample(**each)


_OF_A_RUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    """One of the processes."""
    from recpipe_perf_model.bench import sharded

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    file, quick = Path(sys.argv[1]), "--quick" in sys.argv
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    found = [*collectives.measure(quick), *side.measure(group, quick), *sharded.measure(group, quick)]
    if dist.get_rank() == 0:
        file.write_text(json.dumps([asdict(sample) for sample in found]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
