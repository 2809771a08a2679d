"""Models of others under recpipe beside the loop that one writes by hand for them, interleaved.

    python benchmarks/any_model.py [--rounds 5] [--batches 40]

The loop by hand has TorchRec's plain collections and updates tables by fused FBGEMM kernels, as
``FusedEmbeddingBagCollection`` does; recpipe trains the same module through ``recpipe.train`` with the tables
resident, its back end off (plain) and on (auto). Printed are samples per second over the steps after the
first tenth, medians over the rounds, and the ratios to the loop by hand round by round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torchrec.optim
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import fuse_embedding_optimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.backend.host import Host

ROWS, DENSE, BATCH = 20_000, 13, 2048
USER = [f"u{i}" for i in range(13)]
ITEM = [f"i{i}" for i in range(13)]


@dataclass
class Clicks:
    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


def clicks(seed: int) -> Clicks:
    random = torch.Generator().manual_seed(seed)
    names = [*USER, *ITEM]
    ids = (torch.rand(len(names) * BATCH, generator=random) ** 4 * ROWS).long()
    lengths = torch.ones(len(names) * BATCH, dtype=torch.long)
    return Clicks(
        torch.randn(BATCH, DENSE, generator=random),
        KeyedJaggedTensor(names, ids, lengths=lengths),
        (torch.rand(BATCH, generator=random) < 0.25).float(),
    )


def bags(names: list[str], dim: int) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"t_{n}", embedding_dim=dim, num_embeddings=ROWS, feature_names=[n])
        for n in names
    ]
    return EmbeddingBagCollection(configs)


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = bags(USER, 16), bags(ITEM, 32)
        self.left = nn.Sequential(nn.Linear(13 * 16 + DENSE, 256), nn.ReLU(), nn.Linear(256, 64))
        self.right = nn.Sequential(nn.Linear(13 * 32, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        user = self.left(torch.cat([self.user(sparse_features).values(), dense_features], dim=1))
        return (user * self.right(self.item(sparse_features).values())).sum(1)


def deepfm() -> nn.Module:
    return SimpleDeepFMNN(DENSE, bags([*USER, *ITEM], 16), hidden_layer_size=256, deep_fm_dimension=64)


MODELS: dict[str, Callable[[], nn.Module]] = {"two_tower": TwoTower, "deepfm": deepfm}


def by_hand(make: Callable[[], nn.Module], batches: list[Clicks]) -> float:
    """Samples per second of the loop written by hand."""
    torch.manual_seed(1)
    model = fuse_embedding_optimizer(
        make(), torchrec.optim.RowWiseAdagrad, {"lr": 0.02, "eps": 1e-8}, torch.device("cpu")
    )
    dense = [p for n, p in model.named_parameters() if "embedding_bags" not in n]
    optimizer = torch.optim.Adagrad(dense, lr=0.02, fused=True)
    skip, started = len(batches) // 10, 0.0
    for number, batch in enumerate(batches):
        if number == skip:
            started = perf_counter()
        optimizer.zero_grad()
        logits = model(batch.dense_features, batch.sparse_features)
        binary_cross_entropy_with_logits(logits.reshape(-1), batch.labels).backward()
        optimizer.step()
    return (len(batches) - skip) * BATCH / (perf_counter() - started)


def by_recpipe(make: Callable[[], nn.Module], batches: list[Clicks], backend: str) -> float:
    """Samples per second under ``recpipe.train``."""
    torch.manual_seed(1)
    words = ("trainer.progress=false", "optim.tables.lr=0.02", f"trainer.backend={backend}")
    with recpipe.train(make(), batches, *words, quiet=True) as run:
        return float(run.report["throughput"]["samples_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    batches = [clicks(seed) for seed in range(options.batches)]
    print(Host.current(), f"{torch.get_num_threads()} threads, batches of {BATCH}")
    for name, make in MODELS.items():
        found: dict[str, list[float]] = {"by hand": [], "plain": [], "auto": []}
        for _ in range(options.rounds):
            found["by hand"].append(by_hand(make, batches))
            for backend in ("plain", "auto"):
                found[backend].append(by_recpipe(make, batches, backend))
        for kind, speeds in found.items():
            ratios = [mine / theirs for mine, theirs in zip(speeds, found["by hand"], strict=True)]
            print(
                f"{name:10} {kind:8} {median(speeds):>9,.0f} samples/s   "
                f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
