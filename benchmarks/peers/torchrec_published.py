"""TorchRec's example of two towers (``examples/retrieval`` of its checkout), trained on the samples that
``published.py`` wrote with the loss of its training task, and the logits of the held-out ones.

``state`` names a file with all weights' first values; with ``epochs`` 0 nothing is trained.

python benchmarks/peers/torchrec_published.py TORCHREC SAMPLES.npz SCORES.npy '{"arguments": ...}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

BATCH = 512


def batches(samples: Any, part: str, names: list[str]) -> Iterator[Batch]:
    """The samples of a part in their order; of lists, which are filled up with 0, the ids that are there."""
    columns = []
    for name in names:
        ids = torch.from_numpy(samples[f"{part}/{name}"])
        columns.append(ids if ids.dim() == 2 else ids.unsqueeze(1) + 1)
    labels = torch.from_numpy(samples[f"{part}/labels"]).flatten()
    for low in range(0, len(labels), BATCH):
        own = [column[low : low + BATCH] for column in columns]
        values = torch.cat([ids[ids > 0] - 1 for ids in own])
        lengths = torch.cat([(ids > 0).sum(1) for ids in own])
        yield Batch(
            torch.empty(0), KeyedJaggedTensor(names, values, lengths=lengths), labels[low : low + BATCH]
        )


def main() -> None:
    checkout, file, file_of_scores, what = *sys.argv[1:4], json.loads(sys.argv[4])
    sys.path.insert(0, str(Path(checkout, "examples", "retrieval")))
    # A name that annotations of its retrieval module need, and FAISS has for a GPU alone.
    faiss.GpuIndexIVFPQ = getattr(faiss, "GpuIndexIVFPQ", faiss.IndexIVFPQ)
    from modules.two_tower import TwoTower, TwoTowerTrainTask  # type: ignore[import-not-found]

    samples, sizes = np.load(file), what["arguments"]
    described = {f["name"]: f for f in json.loads(str(samples["features"]))["sparse"]}
    names, dim = [sizes["query"], sizes["candidate"]], sizes.get("dim", 16)
    torch.manual_seed(what.get("seed", 1))
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=dim,
            num_embeddings=described[name]["rows"],
            feature_names=[name],
        )
        for name in names
    ]
    task = TwoTowerTrainTask(TwoTower(EmbeddingBagCollection(tables=tables), sizes["layers"]))
    if "state" in what:
        task.two_tower.load_state_dict(
            {name: torch.from_numpy(own) for name, own in np.load(what["state"]).items()}
        )
    optimizer = torch.optim.Adagrad(task.parameters(), lr=what.get("rate", 0.01))
    for _ in range(what.get("epochs", 1)):
        for batch in batches(samples, "train", names):
            optimizer.zero_grad()
            loss, _ = task(batch)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        found = torch.cat([task(batch)[1][1] for batch in batches(samples, "eval", names)])
    np.save(file_of_scores, found.numpy())
    print(json.dumps({"samples": len(found)}))


if __name__ == "__main__":
    main()
