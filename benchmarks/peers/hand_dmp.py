"""The reference: TorchRec's DLRM under DistributedModelParallel in a plain loop, as one writes it by hand.

    python benchmarks/peers/hand_dmp.py DIR [--losses] [--save FILE] [--nudge] [--optimizer sgd]

FBGEMM's fused row-wise Adagrad, Adagrad for the dense part, one process (gloo), all batches in memory; no
settings of torch, threads or the allocator. ``--losses`` reports every step's loss, ``--save`` writes the
first weights to a safetensors file that recpipe can start from, and ``--nudge`` then moves every dense weight
to a neighbouring float32: what that does to the losses is what rounding can do. ``--optimizer sgd`` is for
all parameters.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from work import DENSE, EPSILON, LEARNING_RATE, Clock, Setting, Work, as_is


class HandWritten:
    """The model, its plan and its optimizers; ``batch`` samples a rank and step.

    The plan is that of TorchRec's default planner; ``fused`` keeps it to FBGEMM's fused tables, where it
    would leave small ones to the dense optimizer. ``sgd`` instead of row-wise Adagrad and Adagrad.
    """

    def __init__(
        self,
        tables: Mapping[str, int],
        setting: Setting,
        batch: int,
        fused: bool = False,
        sgd: bool = False,
    ) -> None:
        world, cpu = dist.get_world_size(), torch.device("cpu")
        self.names = list(tables)
        configs = [
            EmbeddingBagConfig(name=n, embedding_dim=setting.dim, num_embeddings=r, feature_names=[n])
            for n, r in tables.items()
        ]
        collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        bottom, top = [*setting.bottom, setting.dim], [*setting.top, 1]
        self.dlrm = DLRM(collection, DENSE, bottom, top, dense_device=cpu)
        optimizer = {
            "optimizer": EmbOptimType.EXACT_SGD if sgd else EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": LEARNING_RATE,
            "eps": EPSILON,
        }
        sharders = [EmbeddingBagCollectionSharder(fused_params=optimizer)]
        topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
        kernels = {n: ParameterConstraints(compute_kernels=["fused"]) for n in tables} if fused else None
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch, constraints=kernels)
        self.plan = planner.collective_plan(self.dlrm, sharders, dist.group.WORLD)
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self.model = DistributedModelParallel(self.dlrm, env, cpu, plan=self.plan, sharders=sharders)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        kind = torch.optim.SGD if sgd else torch.optim.Adagrad
        self.optimizer = KeyedOptimizerWrapper(dense, lambda p: kind(p, lr=LEARNING_RATE))
        self.loss_of = torch.nn.BCEWithLogitsLoss()
        self.lengths = torch.ones(len(self.names) * batch, dtype=torch.int64)

    def step(self, dense: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One update from dense [B, 13], ids [26 * B] and labels [B]; the mean loss."""
        sparse = KeyedJaggedTensor(self.names, ids, lengths=self.lengths)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.loss_of(self.model(dense, sparse).squeeze(1), labels)
        torch.autograd.backward(loss)
        self.optimizer.step()
        return loss

    def nudge(self) -> None:
        """Move every dense weight to the float32 above or below it."""
        with torch.no_grad():
            for name, weights in self.dlrm.named_parameters():
                if not name.startswith("sparse_arch."):
                    weights.copy_(weights.nextafter(torch.randn_like(weights).sign() * torch.inf))

    def save(self, file: Path) -> None:
        """All weights, each table under its name; all tables must be whole on this rank."""
        from safetensors.torch import save_file

        tensors = {}
        for key, value in self.model.state_dict().items():
            if not key.startswith("sparse_arch."):
                tensors[key] = value
                continue
            whole = torch.empty(value.size())
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                whole[row : row + rows, column : column + columns] = shard.tensor
            tensors[key.split(".")[-2]] = whole
        save_file(tensors, str(file))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--nudge", action="store_true")
    parser.add_argument("--optimizer", choices=["adagrad", "sgd"], default="adagrad")
    arguments = parser.parse_args()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    work = Work.load(arguments.directory)
    torch.manual_seed(1)
    sgd = arguments.optimizer == "sgd"
    by_hand = HandWritten(work.tables, work.setting, work.setting.batch, fused=True, sgd=sgd)
    clock, losses = Clock(work, as_is), []
    if arguments.save:
        by_hand.save(arguments.save)
    if arguments.nudge:
        by_hand.nudge()
    for batch in clock:
        loss = by_hand.step(batch.dense, batch.ids.view(-1), batch.labels)
        if arguments.losses:
            losses.append(loss.item())
    clock.report("torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", losses=losses)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
