"""Models of others under recpipe beside the loop that one writes by hand for them, a few steps in turn.

    python benchmarks/any_model.py [--models dlrm two_tower deepfm] [--backends plain auto]
        [--batches 2048] [--dims 16] [--threads 2] [--rounds 10] [--steps 8] [--sharded]

The loop by hand has TorchRec's plain collections, updates tables by fused FBGEMM kernels, as
``FusedEmbeddingBagCollection`` does, and takes its batches from a list. With ``--sharded`` its model is a
``DistributedModelParallel`` of one process, as in benchmarks/peers. recpipe trains the same module on the
same batches through ``recpipe.train`` with the tables resident; its time has Lightning's in it, and reading
and checking the batches. Both run in this process, each with its own torch settings. Printed are
milliseconds of a step, medians over the rounds, and the speed of recpipe over the loop's, round by round:
median (lowest..highest).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import fuse_embedding_optimizer
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.backend.choices import Host
from recpipe.common.process import quiet_libraries

ROWS, DENSE = 20_000, 13
CPU = torch.device("cpu")
USER = [f"u{i}" for i in range(13)]
ITEM = [f"i{i}" for i in range(13)]
EPOCH = 40_960
"""Samples of an epoch at least: each has a start, which would count more in a short one."""
PARTS = ("dense_features", "sparse_features")
"""What models take of a batch, in this order."""
WARM = 2
"""Rounds that do not count."""


@dataclass
class Clicks:
    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


def clicks(seed: int, batch: int) -> Clicks:
    random = torch.Generator().manual_seed(seed)
    names = [*USER, *ITEM]
    ids = (torch.rand(len(names) * batch, generator=random) ** 4 * ROWS).long()
    lengths = torch.ones(len(names) * batch, dtype=torch.long)
    return Clicks(
        torch.randn(batch, DENSE, generator=random),
        KeyedJaggedTensor(names, ids, lengths=lengths),
        (torch.rand(batch, generator=random) < 0.25).float(),
    )


def bags(names: list[str], dim: int) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"t_{n}", embedding_dim=dim, num_embeddings=ROWS, feature_names=[n])
        for n in names
    ]
    return EmbeddingBagCollection(configs)


class TwoTower(nn.Module):
    """Two collections, the items' twice as wide."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.user, self.item = bags(USER, dim), bags(ITEM, 2 * dim)
        self.left = nn.Sequential(nn.Linear(13 * dim + DENSE, 256), nn.ReLU(), nn.Linear(256, 64))
        self.right = nn.Sequential(nn.Linear(26 * dim, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        user = self.left(torch.cat([self.user(sparse_features).values(), dense_features], dim=1))
        return (user * self.right(self.item(sparse_features).values())).sum(1)


def deepfm(dim: int) -> nn.Module:
    return SimpleDeepFMNN(DENSE, bags([*USER, *ITEM], dim), hidden_layer_size=256, deep_fm_dimension=64)


def dlrm(dim: int) -> nn.Module:
    return DLRM(bags([*USER, *ITEM], dim), DENSE, [512, 256, dim], [512, 256, 1])


MODELS: dict[str, Callable[[int], nn.Module]] = {"dlrm": dlrm, "two_tower": TwoTower, "deepfm": deepfm}


def is_table(name: str) -> bool:
    """Whether a parameter of this name is a table of a collection."""
    return ".embedding_bags." in f".{name}" or ".embeddings." in f".{name}"


def fused(model: nn.Module, optimizer: type[torch.optim.Optimizer], knobs: dict[str, Any]) -> nn.Module:
    """``model``, its tables with their optimizer: fused by FBGEMM, but for an ``EmbeddingCollection``'s,
    which TorchRec fuses on no CPU: there the optimizer goes over whole tables in the backward pass."""
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, EmbeddingCollection):
                apply_optimizer_in_backward(optimizer, child.parameters(), knobs)
            elif isinstance(child, EmbeddingBagCollection):
                held = nn.ModuleDict({name: child})
                parent.add_module(name, fuse_embedding_optimizer(held, optimizer, knobs, CPU)[name])
    return model


class ByHand:
    """The loop written by hand."""

    def __init__(self, model: nn.Module, batches: list[Clicks], is_sharded: bool = False) -> None:
        optimizer = torchrec.optim.RowWiseAdagrad
        knobs = {"lr": 0.02, "eps": 1e-8}
        if is_sharded:
            self.model: nn.Module = sharded(model)
        else:
            self.model = fused(model, optimizer, knobs)
        self.takes = [name for name in PARTS if name in signature(model.forward).parameters]
        dense = [p for n, p in self.model.named_parameters() if not is_table(n)]
        self.optimizer = torch.optim.Adagrad(dense, lr=0.02, fused=True)
        self.batches = itertools.cycle(batches)

    def train(self, steps: int) -> float:
        """Seconds of so many steps."""
        started = perf_counter()
        for batch in itertools.islice(self.batches, steps):
            self.optimizer.zero_grad()
            logits = self.model(*(getattr(batch, name) for name in self.takes))
            binary_cross_entropy_with_logits(logits.reshape(-1), batch.labels).backward()
            self.optimizer.step()
        return perf_counter() - started


def sharded(model: nn.Module) -> DistributedModelParallel:
    """``model`` in one process, with fused row-wise Adagrad."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
    tables = [
        c.name
        for m in model.modules()
        if isinstance(m, EmbeddingBagCollection)
        for c in m.embedding_bag_configs()
    ]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device="cpu"),
        constraints={name: ParameterConstraints(compute_kernels=["fused"]) for name in tables},
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


class Beside(L.Callback):
    """After every ``steps`` of the run, as many of the loop by hand."""

    by_hand: ByHand
    steps: int

    def __init__(self) -> None:
        self.done, self.started = 0, perf_counter()
        self.times: list[tuple[float, float]] = []
        """Seconds of the run and of the loop, by round."""
        Beside.last = self

    last: Beside

    def on_train_batch_end(self, *_: Any) -> None:
        self.done += 1
        if self.done % self.steps == 0:
            own, precision = perf_counter() - self.started, torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")  # torch's default, as such a loop has it
            self.times.append((own, self.by_hand.train(self.steps)))
            torch.set_float32_matmul_precision(precision)
            self.started = perf_counter()


def measure(name: str, backend: str, batch: int, dim: int, rounds: int, steps: int, is_sharded: bool) -> str:
    """A line of the table."""
    batches = [clicks(seed, batch) for seed in range(max(20, EPOCH // batch))]
    torch.manual_seed(1)
    Beside.by_hand, Beside.steps = ByHand(MODELS[name](dim), batches, is_sharded), steps
    total = (rounds + WARM) * steps
    words = (
        *("trainer.progress=false", "trainer.logger=null", "optim.tables.lr=0.02"),
        *(f"trainer.backend={backend}", f"trainer.max_steps={total}", f"trainer.max_epochs={total}"),
        "trainer.callbacks=[{_target_: __main__.Beside}]",
    )
    recpipe.train(MODELS[name](dim), batches, *words, quiet=True).close()
    times = Beside.last.times[WARM:]
    ratios = [theirs / mine for mine, theirs in times]
    mine, theirs = (1e3 * median(column) / steps for column in zip(*times, strict=True))
    spread = f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
    return f"{name:10}{batch:>7}{dim:>5}  {backend:6}{theirs:>9.1f}{mine:>9.1f}   {spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", nargs="+", choices=["plain", "auto", "cpu"], default=["plain", "auto"])
    parser.add_argument("--batches", nargs="+", type=int, default=[2048])
    parser.add_argument("--dims", nargs="+", type=int, default=[16])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sharded", action="store_true", help="by DistributedModelParallel")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_libraries()  # TorchRec's planner warns of each table
    print(f"{Host.current()}\n{options.threads} threads\n")
    print(f"{'model':10}{'batch':>7}{'dim':>5}  back end  by hand  recpipe   speed")
    chosen = (options.models, options.batches, options.dims, options.backends)
    for name, batch, dim, backend in itertools.product(*chosen):
        print(measure(name, backend, batch, dim, options.rounds, options.steps, options.sharded), flush=True)
    if options.sharded:
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may abort an orderly end


if __name__ == "__main__":
    main()
