"""One of the peers of ``sequences.py``, trained on the samples that it wrote, and its vectors of the held-out
histories and of all items.

python benchmarks/peers/sequences_peers.py META SAMPLES.npz VECTORS.npz '{"peer": ..., "rate": ...}'

META: a checkout of facebookresearch/generative-recommenders, of which the research models are run; RecBole is
imported. Modules, their first values and their forward passes are the peers' own; dropout is off.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

BLOCKS = 2


class RecBoleSASRec(nn.Module):
    """RecBole's: of histories from the left, id 0 after their ends."""

    def __init__(self, rows: int, dim: int, length: int, what: dict[str, Any]) -> None:
        super().__init__()
        from recbole.model.sequential_recommender.sasrec import SASRec  # type: ignore[import-not-found]

        config = {
            "USER_ID_FIELD": "user",
            "ITEM_ID_FIELD": "item",
            "LIST_SUFFIX": "_list",
            "ITEM_LIST_LENGTH_FIELD": "length",
            "NEG_PREFIX": "neg_",
            "MAX_ITEM_LIST_LENGTH": length,
            "device": "cpu",
            "n_layers": what.get("blocks", BLOCKS),
            "n_heads": 1,
            "hidden_size": dim,
            "inner_size": dim,
            "hidden_dropout_prob": 0.0,
            "attn_dropout_prob": 0.0,
            "hidden_act": "relu",
            "layer_norm_eps": what.get("eps", 1e-12),
            "initializer_range": 0.02,
            "loss_type": "CE",
        }

        class Counted:
            def num(self, _: str) -> int:
                return rows

        self.model = SASRec(config, Counted())

    def vectors(self, items: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model.item_embedding(items)
        return found

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The query of each history, float32 [n, D]."""
        found: torch.Tensor = self.model(ids, lengths)
        return found


class Meta(nn.Module):
    """One of Meta's, of its research code; a class below makes the ``model``."""

    model: Any

    def parts(self, rows: int, dim: int, length: int, what: dict[str, Any]) -> dict[str, Any]:
        """What its models are made of."""
        from generative_recommenders.research.modeling.sequential import (  # type: ignore[import-not-found]
            embedding_modules,
            input_features_preprocessors,
            output_postprocessors,
        )
        from generative_recommenders.research.rails.similarities import (  # type: ignore[import-not-found]
            dot_product_similarity_fn,
        )

        places = input_features_preprocessors.LearnablePositionalEmbeddingInputFeaturesPreprocessor
        norm = output_postprocessors.LayerNormEmbeddingPostprocessor
        return {
            "max_sequence_len": length,
            "max_output_len": 0,
            "embedding_dim": dim,
            "num_blocks": BLOCKS,
            "embedding_module": embedding_modules.LocalEmbeddingModule(rows - 1, dim),
            "similarity_module": dot_product_similarity_fn.DotProductSimilarity(),
            "input_features_preproc_module": places(length, dim, 0.0),
            "output_postproc_module": norm(dim, eps=what.get("eps", 1e-6)),
        }

    def vectors(self, items: torch.Tensor) -> torch.Tensor:
        """Of items, float32 [n, D]."""
        found: torch.Tensor = self.model.get_item_embeddings(items)
        return found

    def at_every_position(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The query after each event, float32 [n, length, D]."""
        # Of no times, all of which are the same then: what is learnt is of places alone.
        payloads = {"timestamps": torch.zeros_like(ids)}
        found: torch.Tensor = self.model(lengths, ids, self.model.get_item_embeddings(ids), payloads)
        return found

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The query of each history, float32 [n, D]."""
        return self.at_every_position(ids, lengths)[torch.arange(len(ids)), lengths - 1]


class MetaHSTU(Meta):
    def __init__(self, rows: int, dim: int, length: int, what: dict[str, Any]) -> None:
        super().__init__()
        from generative_recommenders.research.modeling.sequential import hstu

        self.model = hstu.HSTU(
            **self.parts(rows, dim, length, what),
            num_heads=2,
            linear_dim=dim // 2,
            attention_dim=dim // 2,
            normalization="rel_bias",
            linear_config="uvqk",
            linear_activation="silu",
            linear_dropout_rate=0.0,
            attn_dropout_rate=0.0,
            verbose=False,
        )


class MetaSASRec(Meta):
    def __init__(self, rows: int, dim: int, length: int, what: dict[str, Any]) -> None:
        super().__init__()
        from generative_recommenders.research.modeling.sequential import sasrec

        self.model = sasrec.SASRec(
            **self.parts(rows, dim, length, what),
            num_heads=1,
            ffn_hidden_dim=dim,
            ffn_activation_fn="relu",
            ffn_dropout_rate=0.0,
        )


PEERS = {"RecBoleSASRec": RecBoleSASRec, "MetaSASRec": MetaSASRec, "MetaHSTU": MetaHSTU}


def from_the_left(histories: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 [n, length], 0 after the last, and lengths; of histories that end at the right."""
    lengths = (histories >= 0).sum(1)
    moved = [np.roll(row, length - len(row)) for row, length in zip(histories, lengths, strict=True)]
    return torch.from_numpy(np.maximum(np.stack(moved), 0)), torch.from_numpy(lengths)


def softmax(
    queries: torch.Tensor, vectors: torch.Tensor, items: torch.Tensor, log_q: torch.Tensor
) -> torch.Tensor:
    """The loss of ``model.loss={name: in_batch_softmax, candidate_ids: item}``."""
    scores = queries @ vectors.T - log_q
    same = (items[:, None] == items[None, :]) & ~torch.eye(len(items), dtype=torch.bool)
    return F.cross_entropy(scores.masked_fill(same, -torch.inf), torch.arange(len(items)))


def loss_of(
    model: Any, ids: torch.Tensor, lengths: torch.Tensor, items: torch.Tensor, log_q: torch.Tensor | None
) -> torch.Tensor:
    """Of the last positions, or, without ``log_q``, of every one, each predicting the next event."""
    if log_q is not None:
        return softmax(model(ids, lengths), model.vectors(items), items, log_q)
    present = torch.arange(ids.shape[1]) < lengths[:, None]
    following = torch.cat([ids[:, 1:], torch.zeros(len(ids), 1, dtype=ids.dtype)], dim=1)
    following[torch.arange(len(ids)), lengths - 1] = items
    items = following[present]
    _, which, counts = torch.unique(items, return_inverse=True, return_counts=True)
    shares = (counts[which] / len(items)).log()
    return softmax(model.at_every_position(ids, lengths)[present], model.vectors(items), items, shares)


def main() -> None:
    checkout, file, file_of_vectors, what = sys.argv[1], *sys.argv[2:4], json.loads(sys.argv[4])
    sys.path.insert(0, checkout)
    importlib.import_module("fbgemm_gpu")  # operators of Meta's code

    torch.manual_seed(what.get("seed", 1))
    samples = np.load(file)
    ids, lengths = from_the_left(samples["train/histories"])
    items, log_q = (torch.from_numpy(samples[f"train/{name}"]) for name in ("items", "log_q"))
    rows = int(samples["rows"])
    model = PEERS[what["peer"]](rows, int(samples["dim"]), ids.shape[1], what)
    if "state" in what:
        state = {name: torch.from_numpy(own) for name, own in np.load(what["state"]).items()}
        lacking, unknown = model.model.load_state_dict(state, strict=False)
        if unknown or set(lacking) - {"_attn_mask"}:
            sys.exit(f"weights {lacking} are not given, and {unknown} not known")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=what.get("rate", 0.1), eps=1e-10)
    size = what.get("batch", 512)
    for _ in range(what["epochs"]):
        for low in range(0, len(items), size):
            own = slice(low, low + size)
            optimizer.zero_grad()
            share = None if what.get("every_position") else log_q[own]
            loss_of(model, ids[own], lengths[own], items[own], share).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        queries = model(*from_the_left(samples["eval/histories"]))
        vectors = model.vectors(torch.arange(rows))
    np.savez(file_of_vectors, queries=queries.numpy(), items=vectors.numpy())
    print(json.dumps({"samples": len(queries)}))


if __name__ == "__main__":
    main()
