"""RecBole's SASRec or Meta's ranker of HSTU (``DlrmHSTU``), trained on the samples that ``published.py``
wrote, and the logits of the held-out ones.

RecBole's scores a target by the product of its vector with the state of the history, as its ``predict``
does, and is trained by binary cross-entropy of that score. Meta's has the target as the last token and a
loss of its own, which is that of one task; it is given no times and no actions, and its operators are those
in PyTorch. Both have one history and its target, and their own first values.

python benchmarks/peers/ranked_published.py META SAMPLES.npz SCORES.npy '{"model": ..., "rate": ...}'
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sequences_peers import RecBoleSASRec
from torch import nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

BATCH, DIM = 512, 16
Samples = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Histories int64 [B, T], filled up with 0 behind the last event; targets int64 [B]; labels float32 [B]."""


def batches(samples: Any, part: str, described: dict[str, Any]) -> Iterator[Samples]:
    """The samples of a part in their order."""
    (sequence,) = (f["name"] for f in described["sparse"] if f["length"])
    (target,) = (f["name"] for f in described["sparse"] if not f["length"])
    columns = [samples[f"{part}/{name}"] for name in (sequence, target, "labels")]
    histories, targets, labels = (torch.from_numpy(column) for column in columns)
    for low in range(0, len(labels), BATCH):
        own = slice(low, low + BATCH)
        yield histories[own], targets[own] + 1, labels[own].flatten()


class SASRec(RecBoleSASRec):
    """RecBole's, as a ranker."""

    def logits_of(self, histories: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        query = self(histories, (histories > 0).sum(1))
        return (query * self.vectors(targets)).sum(1)

    def loss_of(self, histories: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self.logits_of(histories, targets), labels)


class DlrmHSTU(nn.Module):
    """Meta's ranker: tokens of the width of its rows, 2 layers of 2 heads, no dropout."""

    def __init__(self, rows: int, dim: int, length: int, what: dict[str, Any]) -> None:
        super().__init__()
        from generative_recommenders.common import HammerKernel  # type: ignore[import-not-found]
        from generative_recommenders.modules import dlrm_hstu  # type: ignore[import-not-found]
        from generative_recommenders.modules.multitask_module import (  # type: ignore[import-not-found]
            MultitaskTaskType,
            TaskConfig,
        )
        from torchrec.modules.embedding_configs import EmbeddingConfig

        width = what.get("width", 32)
        config = dlrm_hstu.DlrmHSTUConfig(
            max_seq_len=length + 1,
            max_num_candidates=1,
            max_num_candidates_inference=1,
            hstu_num_heads=2,
            hstu_attn_linear_dim=width // 2,
            hstu_attn_qk_dim=width // 2,
            hstu_attn_num_layers=2,
            hstu_embedding_table_dim=dim,
            hstu_transducer_embedding_dim=width,
            hstu_input_dropout_ratio=0.0,
            hstu_linear_dropout_rate=0.0,
            causal_multitask_weights=1.0,
            multitask_configs=[TaskConfig("seen", 1, MultitaskTaskType.BINARY_CLASSIFICATION)],
            user_embedding_feature_names=["events"],
            item_embedding_feature_names=["target"],
            uih_post_id_feature_name="events",
            uih_action_time_feature_name="times",
            candidates_querytime_feature_name="time",
            candidates_weight_feature_name="label",
            candidates_watchtime_feature_name="watched",
            merge_uih_candidate_feature_mapping=[
                ("events", "target"),
                ("times", "time"),
                ("labels", "label"),
                ("watches", "watched"),
            ],
            use_layer_norm_postprocessor=True,
        )
        table = EmbeddingConfig(
            name="rows", num_embeddings=rows, embedding_dim=dim, feature_names=["events", "target"]
        )
        self.model = dlrm_hstu.DlrmHSTU(config, {"rows": table}, is_inference=False)
        self.model.set_hammer_kernel(HammerKernel.PYTORCH)
        # Its tables are made on the meta device, for TorchRec to shard.
        collection = self.model._embedding_collection.to_empty(device=torch.device("cpu"))
        assert table.init_fn is not None
        with torch.no_grad():
            table.init_fn(collection.embeddings["rows"].weight)

    def _given(
        self, histories: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and probabilities of the samples."""
        there = histories > 0
        events, lengths = histories[there], there.sum(1)
        none, zeros = torch.zeros_like(events), torch.zeros_like(targets)
        before = ["events", "times", "labels", "watches"]
        past = KeyedJaggedTensor(before, torch.cat([events, none, none, none]), lengths=lengths.repeat(4))
        now = ["target", "time", "label", "watched"]
        values = torch.cat([targets, zeros, labels.long(), zeros])
        here = KeyedJaggedTensor(now, values, lengths=torch.ones(len(values), dtype=torch.long))
        _, _, losses, found, _, _ = self.model(past, here)
        return sum(losses.values(), torch.zeros(())), found[0]

    def logits_of(self, histories: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.logit(self._given(histories, targets, torch.zeros(len(targets)))[1].double(), 1e-12)

    def loss_of(self, histories: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._given(histories, targets, labels)[0]


MODELS = {"SASRec": SASRec, "DlrmHSTU": DlrmHSTU}


def main() -> None:
    checkout, file, file_of_scores, what = *sys.argv[1:4], json.loads(sys.argv[4])
    sys.path.insert(0, checkout)
    importlib.import_module("fbgemm_gpu")  # operators of Meta's code
    samples = np.load(file)
    described = json.loads(str(samples["features"]))
    rows, length = next((f["rows"] + 1, f["length"]) for f in described["sparse"] if f["length"])
    torch.manual_seed(what.get("seed", 1))
    model: Any = MODELS[what["model"]](rows, DIM, length, what["arguments"])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=what.get("rate", 0.01), eps=1e-10)
    for _ in range(what.get("epochs", 1)):
        for histories, targets, labels in batches(samples, "train", described):
            optimizer.zero_grad()
            model.loss_of(histories, targets, labels).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        every = batches(samples, "eval", described)
        found = torch.cat([model.logits_of(histories, targets) for histories, targets, _ in every])
    np.save(file_of_scores, found.numpy())
    print(json.dumps({"samples": len(found)}))


if __name__ == "__main__":
    main()
