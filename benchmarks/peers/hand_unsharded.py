"""TorchRec's DLRM over unsharded tables in a plain loop, as one writes it by hand.

    python benchmarks/peers/hand_unsharded.py DIR [--fused]

By default an ``EmbeddingBagCollection`` whose tables row-wise Adagrad updates in the backward pass; with
``--fused`` a ``FusedEmbeddingBagCollection``, that is FBGEMM's tables with the same optimizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from work import DENSE, EPSILON, LEARNING_RATE, Clock, Work, as_is


def make_model(work: Work, fused: bool) -> DLRM:
    """The model, its tables with their optimizer."""
    setting = work.setting
    configs = [
        EmbeddingBagConfig(name=n, embedding_dim=setting.dim, num_embeddings=r, feature_names=[n])
        for n, r in work.tables.items()
    ]
    knobs = {"lr": LEARNING_RATE, "eps": EPSILON}
    if fused:
        collection = FusedEmbeddingBagCollection(configs, RowWiseAdagrad, knobs)
    else:
        collection = EmbeddingBagCollection(tables=configs)
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), knobs)
    return DLRM(collection, DENSE, [*setting.bottom, setting.dim], [*setting.top, 1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--fused", action="store_true")
    arguments = parser.parse_args()
    work = Work.load(arguments.directory)
    model = make_model(work, arguments.fused)
    dense = [p for n, p in model.named_parameters() if not n.startswith("sparse_arch.")]
    optimizer = torch.optim.Adagrad(dense, lr=LEARNING_RATE)
    loss_of = torch.nn.BCEWithLogitsLoss()
    names = list(work.tables)
    lengths = torch.ones(len(names) * work.setting.batch, dtype=torch.int64)
    offsets = torch.arange(len(lengths) + 1)
    clock = Clock(work, as_is)
    for batch in clock:
        sparse = KeyedJaggedTensor(names, batch.ids.view(-1), lengths=lengths, offsets=offsets)
        optimizer.zero_grad()
        loss = loss_of(model(batch.dense, sparse).squeeze(1), batch.labels)
        loss.backward()
        optimizer.step()
    clock.report("torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")


if __name__ == "__main__":
    main()
