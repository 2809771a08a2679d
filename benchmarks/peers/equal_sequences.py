"""Whether SASRec and HSTU compute what RecBole's SASRec and Meta's HSTU do: weights are copied from recpipe's
to the peer's, histories are the same, and the vectors of queries and items are compared, in float32.

    python benchmarks/peers/equal_sequences.py --meta CHECKOUT [--python PATH] [--json FILE]

HSTU's is compared whole. RecBole's blocks normalize what they have added up, recpipe's and the paper's what
they take in, so that weights alone make blocks alike in which attention or the layers after it do nothing:
both are compared, each by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from equal_table import Compared, tell
from rounds import result_of
from sequences import DIM, HISTORY, vectors_of
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.schema import Schema
from recpipe.model.config import UserModel
from recpipe.model.make import make_model
from recpipe.plugin.tables import SparseFeature

HERE = Path(__file__).resolve().parent
ROWS, SAMPLES = 50, 256
EPS = 1e-12
"""Of SASRec's norms on both sides, RecBole's own: so normalizing twice is as normalizing once."""
SCHEMA = Schema(
    (), (SparseFeature("item", ROWS), SparseFeature("items", ROWS, table="item", sequence=HISTORY))
)
Weights = Mapping[str, torch.Tensor]


def recbole_sasrec(w: Weights) -> dict[str, torch.Tensor]:
    """RecBole's projections have biases, of 0, and it has one after its heads, the unit matrix."""
    block, theirs = "transformers.0.blocks.0", "trm_encoder.layer.0"
    attention, feed = f"{theirs}.multi_head_attention", f"{theirs}.feed_forward"
    none, ones = torch.zeros(DIM), torch.ones(DIM)
    found = {
        "item_embedding.weight": w["histories.embedding_collection.embeddings.item.weight"],
        "position_embedding.weight": w["transformers.0.places"],
        "LayerNorm.weight": ones,
        "LayerNorm.bias": none,
        f"{attention}.dense.weight": torch.eye(DIM),
        f"{attention}.dense.bias": none,
        f"{attention}.LayerNorm.weight": ones,
        f"{attention}.LayerNorm.bias": none,
    }
    projected = w[f"{block}.attention.project.weight"].chunk(3)
    for name, weight in zip(("query", "key", "value"), projected, strict=True):
        found |= {f"{attention}.{name}.weight": weight, f"{attention}.{name}.bias": none}
    for of in ("weight", "bias"):
        found |= {f"{feed}.dense_{n}.{of}": w[f"{block}.feed.{2 * n - 2}.{of}"] for n in (1, 2)}
        found[f"{feed}.LayerNorm.{of}"] = w[f"transformers.0.norm.{of}"]
    return found


def meta_hstu(w: Weights) -> dict[str, torch.Tensor]:
    """Meta's adds a vector of each place, recpipe's the same one, and a bias of times, of 0."""
    found = {
        "_embedding_module._item_emb.weight": w["histories.embedding_collection.embeddings.item.weight"],
        "_input_features_preproc._pos_emb.weight": w["transducers.0.enter.bias"].expand(HISTORY, -1),
    }
    for n in range(2):
        unit, theirs = f"transducers.0.units.{n}", f"_hstu._attention_layers.{n}"
        places = w[f"{unit}.places"]
        found |= {
            f"{theirs}._uvqk": w[f"{unit}.project.weight"].T,
            f"{theirs}._o.weight": w[f"{unit}.joined.weight"],
            f"{theirs}._o.bias": w[f"{unit}.joined.bias"],
            f"{theirs}._rel_attn_bias._pos_w": torch.cat([places.flip(0), torch.zeros(HISTORY - 1)]),
            f"{theirs}._rel_attn_bias._ts_w": torch.zeros(129),
        }
    return found


@dataclass(frozen=True)
class Case:
    """A model, under both names, and how the two are made alike."""

    recipe: tuple[str, ...]
    peer: str
    weights: Callable[[Weights], dict[str, torch.Tensor]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    """Parts of parameters' names whose values are 0."""
    differs: str = ""


SASREC = ("model=sasrec", "model.blocks=1", "model.autoregressive=true")
ONE = {"blocks": 1, "eps": EPS}
CASES = {
    "sasrec: attention": Case(
        SASREC,
        "RecBoleSASRec",
        recbole_sasrec,
        ONE,
        ("feed.2.",),
        "the layers after attention, before whose norm RecBole normalizes once more",
    ),
    "sasrec: layers after it": Case(
        SASREC,
        "RecBoleSASRec",
        recbole_sasrec,
        ONE,
        ("attention.project",),
        "attention, after which RecBole normalizes once more",
    ),
    "hstu": Case(
        ("model=hstu", f"model.width={DIM}"),
        "MetaHSTU",
        meta_hstu,
        {"eps": 1e-5},
        ("project.bias", "top.1."),
        "recpipe's biases before the units, and its MLP over everything else; Meta's vectors of places and "
        "biases of times",
    ),
}


def model_of(case: Case) -> nn.Module:
    """recpipe's; what RecBole and Meta have no weights for is as at first: norms, and HSTU's maps of rows."""
    words = [*case.recipe, f"model.embedding_dim={DIM}", "model.retrieval=true"]
    config = Recipe.of(compose([*words, "model.loss=in_batch_softmax"])).model
    assert isinstance(config, UserModel)
    torch.manual_seed(7)
    model = make_model(config, SCHEMA, torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, EmbeddingCollection):
            for table in module.to_empty(device=torch.device("cpu")).parameters():
                nn.init.uniform_(table, -5, 5)
        if isinstance(module, nn.LayerNorm) and case.peer == "RecBoleSASRec":
            module.eps = EPS
    own = ("places", "project", "joined", "feed", "transformers.0.norm.", "enter.bias")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in own):
                parameter.add_(0.2 * torch.randn_like(parameter))
            if any(part in name for part in case.idle):
                parameter.zero_()
    return model.eval()


def histories() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of one event to ``HISTORY``, int64 [n, HISTORY], -1 before the first; id 0 stands for none in peers."""
    drawn = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, HISTORY + 1, (SAMPLES, 1), generator=drawn)
    ids = torch.randint(1, ROWS, (SAMPLES, HISTORY), generator=drawn)
    return torch.where(torch.arange(HISTORY) >= HISTORY - lengths, ids, -1).numpy()


def compared(case: Case, python: str, checkout: Path) -> Compared:
    """Values of vectors; the standard deviation is that of queries."""
    model, items = model_of(case), np.arange(ROWS)
    none = np.full((ROWS, HISTORY), -1)
    of_samples = np.ones(SAMPLES, np.int64)
    queries = vectors_of(model, SCHEMA, of_samples, histories())[0]
    candidates = vectors_of(model, SCHEMA, items, none)[1]
    with tempfile.TemporaryDirectory() as folder:
        samples, state, vectors = (Path(folder, f"{name}.npz") for name in ("samples", "state", "vectors"))
        arrays: dict[str, Any] = {
            f"{part}/{name}": values
            for part in ("train", "eval")
            for name, values in (("items", of_samples), ("histories", histories()))
        }
        np.savez(samples, rows=ROWS, dim=DIM, **arrays, **{"train/log_q": np.zeros(SAMPLES, np.float32)})
        own = case.weights(dict(model.named_parameters()))
        weights: dict[str, Any] = {name: weight.detach().numpy() for name, weight in own.items()}
        np.savez(state, **weights)
        what = json.dumps({"peer": case.peer, "epochs": 0, "state": str(state), **case.arguments})
        files = [str(samples), str(vectors), what]
        result_of([python, str(HERE / "sequences_peers.py"), str(checkout), *files])
        found = np.load(vectors)
        apart = max(np.abs(found["queries"] - queries).max(), np.abs(found["items"] - candidates).max())
    return Compared(case.peer, float(apart), float(queries.std()), case.differs)


def main(words: Sequence[str] | None = None) -> None:
    """Compare all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--meta", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    tell(((name, compared(case, options.python, options.meta)) for name, case in CASES.items()), options.json)


if __name__ == "__main__":
    main()
