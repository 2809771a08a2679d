"""Ranks that train on GPUs, with ``tests/pretend_gpu`` in place of each: no tensor of a GPU meets one of the
host.

NCCL's collectives go by gloo, which does not mind. Data-parallel tables are left out: their gradients are
made in C++, where nobody sees that they should be on a GPU.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from recpipe.config.compose import compose
from recpipe.run import run
from recpipe.setup import ctx
from recpipe.tables.sharding import plan
from tests.pretend_gpu import cuda
from tests.processes import start_ranks

SMALL = (
    "data.samples=1300",
    "data.batch_size=64",
    "data.table_scale=0.01",
    "trainer.device=cuda",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.eval_every=5",
    "trainer.checkpoint_every=6",
    "trainer.max_steps=12",
    "task.page=false",
)
BY_ROWS = ("+plugin=neo", "plugins.neo.planner=torchrec", "plugins.neo.sharding=row_wise")
RECIPES = {
    "replicas": ("tiers.policy=resident",),
    "tiers": ("tiers.policy=lru", "tiers.store=host"),
    "shards behind a cache": (*BY_ROWS, "tiers.kernel=uvm_caching"),
    "shards in tiers": (*BY_ROWS, "tiers.policy=lfu", "tiers.store=host"),
}


def _rank(rank: int, folder: str, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    cuda.install()  # this process has one GPU, which is number 0 whatever its rank
    gpu = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctx, "choose_device", lambda name: gpu)
        patch.setattr(plan, "placement", lambda kind, rank, local_world: f"rank:{rank}/{gpu}")
        for name, words in RECIPES.items():
            places = Path(folder, name, "first"), Path(folder, name, "again")
            first, again = (f"trainer.checkpoint_dir='{place}/kept'" for place in places)
            run(compose([*SMALL, *words, first]), places[0] / str(rank))
            on = ("trainer.max_steps=15", f"resume='{places[0]}/kept'", again)
            report = run(compose([*SMALL, *words, *on]), places[1] / str(rank))
            assert rank or report["resumed"]["step"] == 12
    os._exit(0)


@pytest.mark.soak
def test_ranks_train_and_go_on_without_mixing_devices(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_ranks(_rank, (str(tmp_path), port), 2)
    assert all((tmp_path / name / "again" / "0" / "report.json").exists() for name in RECIPES)
