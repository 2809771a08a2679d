"""Made-up models of the shapes of DRM1, DRM2 and DRM3, scaled to this machine's memory, and requests to them.

Of the paper's models (ISPASS 2021; recalled, not read again) DRM1 has 257 tables of 200 GB, the largest of
3.6 GB; DRM2 133 tables of 138 GB, the largest of 6.7 GB; DRM3 39 tables of 200 GB, one of which has 178.8 GB
and is looked up once a sample. Here each has a fifth of the tables (DRM3 a third), with shares of the rows
that are alike. The first two have two nets, of the user and of the candidates, and the third has one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving import http, kserve
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.kit import Schema

MODELS = ("drm1", "drm2", "drm3")
DIFFERENT = 64
"""Requests of a load, which come again and again."""
TABLES = {"drm1": 52, "drm2": 26, "drm3": 13}
LARGEST = {"drm1": 0.018, "drm2": 0.049, "drm3": 0.894}
"""The share of the rows that the largest table has."""


def sizes(kind: str, rows: int) -> list[int]:
    """The rows of each table, ``rows`` in all; the tables of the user come first."""
    count, largest = TABLES[kind], LARGEST[kind]
    others = np.random.default_rng(1).uniform(0.2, 1.0, count - 1)
    shares = [largest, *(others / others.sum() * (1 - largest)).clip(0, largest)]
    return [max(50, int(rows * share)) for share in shares]


def pooling(kind: str, ids: int) -> list[int]:
    """Of each table: ``ids`` of every other one, and one id of the others and of DRM3's largest."""
    found = [ids if at % 2 == 0 else 1 for at in range(TABLES[kind])]
    return [1, *found[1:]] if kind == "drm3" else found


def user_features(kind: str) -> list[str]:
    """The features that a request's candidates share."""
    return [f"t{at}" for at in range(TABLES[kind] // 2)]


class Nets(nn.Module):
    """An MLP over the dense features and the sums of one or two nets' tables."""

    def __init__(self, schema: Schema, nets: int, dim: int, hidden: int) -> None:
        super().__init__()
        own, cut = schema.sparse, len(schema.sparse) // 2
        parts = [own] if nets == 1 else [own[:cut], own[cut:]]
        self.nets = nn.ModuleList(
            EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        name=each.name, num_embeddings=each.rows, embedding_dim=dim, feature_names=[each.name]
                    )
                    for each in part
                ],
                device=torch.device("meta"),
            )
            for part in parts
        )
        width = max(1, len(schema.dense)) + dim * len(own)
        self.top = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """float32 [B, 1]."""
        sums = [net(sparse_features).values() for net in self.nets]
        scores: torch.Tensor = self.top(torch.cat([dense_features, *sums], 1))
        return scores


def packaged(kind: str, rows: int, dim: int, ids: int, folder: Path) -> Path:
    """A package of the model after two steps, in ``folder``, unless it is there already."""
    import recpipe

    target = folder / f"{kind}.recpipe"
    if target.exists():
        return target
    tables = ", ".join(f"t{at}: {own}" for at, own in enumerate(sizes(kind, rows)))
    words = (
        *(f"data.tables={{{tables}}}", f"data.pooling={pooling(kind, ids)}", "data.samples=4000"),
        *("model._target_=scale_out_models.Nets", f"model.nets={1 if kind == 'drm3' else 2}"),
        *(f"model.dim={dim}", "model.hidden=256", "trainer.max_steps=2", "trainer.logger=null"),
        "trainer.device=cpu",
    )
    recpipe.train(None, None, *words, output=folder / f"{kind}-run", quiet=True).close()
    return recpipe.package(folder / f"{kind}-run", target, reference=False, popularity=True, quiet=True)


def requests(package: Path, candidates: int, ids: int) -> list[bytes]:
    """Different ones, of skewed ids: one user with half of the features, and candidates with the others."""
    kind = package.name.partition(".")[0]
    manifest, draw = json.loads((package / "manifest.json").read_text()), np.random.default_rng(5)
    shared = set(user_features(kind))
    counts = {f"t{at}": count for at, count in enumerate(pooling(kind, ids))}
    made = []
    for _ in range(DIFFERENT):
        inputs: dict[str, Any] = {
            "dense": draw.random((candidates, len(manifest["dense"]["names"])), np.float32)
        }
        for feature in manifest["sparse"]:
            name = feature["name"]
            shape = (1 if name in shared else candidates, counts[name])
            ids = (draw.zipf(1.2, shape) - 1) % feature["rows"]
            inputs[name] = ids[:, 0].copy() if shape[1] == 1 else ids
        made.append(http(f"/v2/models/{kind}/infer", *kserve(inputs)))
    return made
