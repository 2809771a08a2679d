"""Whether recpipe's published models compute what those of FuxiCTR, Meta and TorchRec do: weights are copied
from one to the other, inputs are the same, and logits are compared, in float32.

    python benchmarks/peers/equal.py --fuxictr FUXICTR --dlrm DLRM --tbsm TBSM --torchrec TORCHREC
        [--python PATH] [--models deepfm din ...] [--json FILE]

``equal_weights.py`` says where each weight of a peer's comes from, and ``PAIRS`` which terms one side alone
has: those are weighted so that they do nothing. Models whose peers have no checkout are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equal_weights as weights
import numpy as np
import torch
from equal_table import Compared, tell
from equal_weights import DENSE, DIM, IDS
from published_peers import FUXICTR, GRUS, PEERS, TBSM, TORCHREC, add_checkouts, places_of
from rounds import result_of
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.schema import LabelColumn, Schema
from recpipe.model.config import UserModel
from recpipe.model.make import make_model
from recpipe.plugin.tables import SparseFeature

HISTORY, SAMPLES = 5, 256
ROWS = dict(zip(IDS, (40, 50, 12), strict=True))
EVENTS = {"items": "item", "categories": "category"}
"""Sequences, and their tables."""


@dataclass(frozen=True)
class Pair:
    """A model, under both names, and how the two are made alike."""

    recipe: tuple[str, ...]
    named: str
    """The peer's model."""
    arguments: Mapping[str, Any]
    weights: Callable[[weights.Weights], dict[str, torch.Tensor]]
    takes: str = "fields"
    """``fields``: ids, then dense values; ``wide``: dense values, then ids; ``history``: ids and events;
    ``two``: a user and an item."""
    labels: int = 1
    peer: str = FUXICTR
    model: str = ""
    """The name in ``conf/model``, where the pair has another."""
    whole: bool = False
    """Whether all histories have the greatest length."""
    differs: str = ""
    """Terms that one side alone has, which do nothing here."""


CROSSES = ("model.layers=2", "model.rank=null", "model.hidden=[16,8]")
EXPERTS = ("model.expert=[8,6]", "model.tower=[5]")
TASKS = {"expert_hidden_units": [8, 6], "gate_hidden_units": [], "tower_hidden_units": [5]}
CLICK = (
    *("model.query_layers=[8,4]", "model.candidate_layers=[8,4]", "model.retrieval=false"),
    "model.loss=binary_cross_entropy",
)
VECTOR = "FuxiCTR makes a vector of each dense value"
PAIRS = {
    "wide_deep": Pair(
        ("model.hidden=[16,8]",),
        "WideDeep",
        {"hidden_units": [16, 8]},
        weights.wide_deep,
        "wide",
        differs=VECTOR,
    ),
    "deepfm": Pair(("model.hidden=[16,8]",), "DeepFM", {"hidden_units": [16, 8]}, weights.deepfm),
    "xdeepfm": Pair(
        ("model.layers=[4,3]", "model.hidden=[16,8]"),
        "xDeepFM",
        {"cin_hidden_units": [4, 3], "dnn_hidden_units": [16, 8]},
        weights.xdeepfm,
        differs="FuxiCTR's interaction layers have biases",
    ),
    "dcnv2": Pair(
        CROSSES,
        "DCNv2",
        {"model_structure": "parallel", "num_cross_layers": 2, "parallel_dnn_hidden_units": [16, 8]},
        weights.dcnv2,
        "wide",
        differs=VECTOR,
    ),
    "autoint": Pair(
        ("model.layers=2", "model.heads=2", "model.width=4", "model.hidden=[8]"),
        "AutoInt",
        {"attention_layers": 2, "num_heads": 2, "attention_dim": 8, "dnn_hidden_units": [8]},
        weights.autoint,
        differs="recpipe projects the field itself in the second layer, too: by the unit matrix here",
    ),
    "finalmlp": Pair(
        ("model.left=[16,8]", "model.right=[12]", "model.gate=[8]", "model.heads=2"),
        "FinalMLP",
        {"mlp1_hidden_units": [16, 8], "mlp2_hidden_units": [12], "fs_hidden_units": [8], "num_heads": 2},
        weights.finalmlp,
        differs="FuxiCTR has the bias of the fusion twice",
    ),
    "masknet": Pair(
        ("model.blocks=[12,8]", "model.reduction_ratio=1"),
        "MaskNet",
        {"model_type": "SerialMaskNet", "dnn_hidden_units": [12, 8], "reduction_ratio": 1},
        weights.masknet,
    ),
    "wukong": Pair(
        (
            "model.layers=2",
            "model.products=3",
            "model.mixtures=3",
            "model.rank=8",
            "model.products_hidden=[8]",
            "model.hidden=[8]",
        ),
        "WuKong",
        {
            "num_wukong_layers": 2,
            "fmb_features": 3,
            "lcb_features": 3,
            "fmp_rank_k": 8,
            "fmb_mlp_units": [8],
            "mlp_hidden_units": [8],
            "mlp_batch_norm": False,
        },
        weights.wukong,
        differs="FuxiCTR has a ReLU after the MLP over products, and a bias where the input is mixed",
    ),
    "shared_bottom": Pair(
        ("model.bottom=[8,6]", "model.tower=[5]"),
        "ShareBottom",
        {"bottom_hidden_units": [8, 6], "tower_hidden_units": [5]},
        weights.shared_bottom,
        "wide",
        labels=2,
        differs=VECTOR,
    ),
    "mmoe": Pair(
        ("model.experts=3", *EXPERTS),
        "MMoE",
        {"num_experts": 3, **TASKS},
        weights.mmoe,
        "wide",
        labels=2,
        differs=f"{VECTOR}; its gates have biases",
    ),
    "ple": Pair(
        ("model.layers=1", "model.own_experts=2", "model.shared_experts=2", *EXPERTS),
        "PLE",
        {"num_layers": 1, "num_specific_experts": 2, "num_shared_experts": 2, **TASKS},
        weights.ple,
        "wide",
        labels=2,
        differs=f"{VECTOR}; its gates have biases; with more layers, its shared stream mixes shared experts "
        "alone, all of them in the paper and here",
    ),
    "din": Pair(
        ("model.hidden=[16,8]", "model.attention=[8]"),
        "DIN",
        {
            "dnn_hidden_units": [16, 8],
            "attention_hidden_units": [8],
            "attention_hidden_activations": "PReLU",
        },
        weights.din,
        "history",
        differs="PReLU, FuxiCTR's Dice by default, has a slope for each value there",
    ),
    "dien": Pair(
        ("model.hidden=[16,8]",),
        "DIEN",
        {"dnn_hidden_units": [16, 8], "batch_norm": False, "dien_neg_seq_field": []},
        weights.dien,
        "history",
        peer=GRUS,
    ),
    "tbsm": Pair(
        ("model.bottom=[8]", "model.top=[8]", "model.vector=6", "model.weighting=[8]", "model.hidden=[8]"),
        "TBSM_Net",
        {"bottom": [8], "top": [8], "vector": 6, "weighting": [8], "hidden": [8]},
        weights.tbsm,
        "history",
        peer=TBSM,
        whole=True,
        differs="Meta's vectors of events go through a ReLU, and before the first event it has rows, and "
        "recpipe zeros: all histories are of the greatest length here",
    ),
    "two_tower": Pair(
        (*CLICK, "model.candidate=[item]"),
        "TwoTower",
        {"layers": [8, 4], "query": "of_user", "candidate": "of_item"},
        weights.two_tower,
        "two",
        peer=TORCHREC,
        differs="TorchRec's towers end in a ReLU",
    ),
    "two_tower_dssm": Pair(
        (*CLICK, "model.candidate=[item,category]"),
        "DSSM",
        {"user_tower_units": [8, 4], "item_tower_units": [8, 4], "items": ["of_item", "of_category"]},
        weights.dssm,
        "history",
        model="two_tower",
    ),
    "bst": Pair(
        ("model.hidden=[16,8]", "model.heads=2", "model.place_dim=16"),
        "BST",
        {"dnn_hidden_units": [16, 8], "num_heads": 2, "seq_pooling_type": "concat"},
        weights.bst,
        "history",
        whole=True,
        differs="FuxiCTR's attention has biases, and the last MLP sees the target's rows, too; before the "
        "first event it has states, and recpipe zeros: all histories are of the greatest length here",
    ),
}
"""By the names of ``conf/model``."""


def schema_of(pair: Pair) -> Schema:
    ids = [SparseFeature(name, rows) for name, rows in ROWS.items()]
    events = [SparseFeature(name, ROWS[of], table=of, sequence=HISTORY) for name, of in EVENTS.items()]
    labels = tuple(LabelColumn(f"label_{n}") for n in range(pair.labels))
    if pair.takes == "two":
        return Schema((), tuple(ids[:2]), labels)
    with_events = pair.takes == "history"
    return Schema(() if with_events else DENSE, tuple(ids + events * with_events), labels)


def model_of(name: str) -> nn.Module:
    """recpipe's, every weight of which counts."""
    pair = PAIRS[name]
    config = Recipe.of(
        compose([f"model={pair.model or name}", f"model.embedding_dim={DIM}", *pair.recipe])
    ).model
    assert isinstance(config, UserModel)
    torch.manual_seed(7)
    model = make_model(config, schema_of(pair), torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            for table in module.to_empty(device=torch.device("cpu")).parameters():
                nn.init.uniform_(table, -0.5, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        found = dict(model.named_parameters())
        if name == "autoint":
            nn.init.eye_(found["interacting.1.residual.weight"])
        if name == "wukong":  # above 0, where a ReLU does nothing
            for layer in range(2):
                found[f"layers.{layer}.products.mlp.1.bias"].add_(10)
        above = {
            "tbsm": ["series.0.top.1.bias"],
            "two_tower": ["query.layers.1.bias", "candidate.layers.1.bias"],
        }
        for bias in above.get(name, ()):
            found[bias].add_(5)
        if name == "tbsm":  # whose vectors differ little on the unit sphere
            found["top.1.weight"].mul_(10)
    return model


def samples_of(pair: Pair) -> tuple[torch.Tensor, KeyedJaggedTensor, dict[str, Any]]:
    """Dense and sparse inputs of recpipe, and the same ones as ``published.py`` writes them."""
    drawn = torch.Generator().manual_seed(3)
    schema = schema_of(pair)
    dense = torch.randn(SAMPLES, len(schema.dense), generator=drawn)
    history = torch.randint(HISTORY if pair.whole else 0, HISTORY + 1, (SAMPLES,), generator=drawn)
    there = torch.arange(HISTORY) >= HISTORY - history.unsqueeze(1)
    first = PEERS[pair.peer].from_first
    written: dict[str, Any] = {"eval/dense": dense.numpy()}
    ids, lengths, described = [], [], []
    for feature in schema.sparse:
        size = (SAMPLES, HISTORY if feature.sequence else 1)
        values = torch.randint(0, feature.rows, size, generator=drawn)
        ids.append(values[there] if feature.sequence else values[:, 0])
        lengths.append(history if feature.sequence else torch.ones(SAMPLES, dtype=torch.long))
        padded = torch.where(there, values + 1, 0) if feature.sequence else values[:, 0]
        if feature.sequence and first:
            padded = padded.gather(1, (torch.arange(HISTORY) - history.unsqueeze(1)) % HISTORY)
        written[f"eval/of_{feature.name}"] = padded.numpy()
        described.append(
            {
                "name": f"of_{feature.name}",
                "rows": feature.rows,
                "table": schema.table_of(feature.name),
                "length": feature.sequence or 0,
            }
        )
    written["eval/labels"] = np.zeros((SAMPLES, pair.labels), np.float32)
    written |= {name.replace("eval", "train"): values for name, values in written.items()}
    features = {"dense": list(schema.dense), "sparse": described, "labels": [c.name for c in schema.labels]}
    written["features"] = json.dumps(features | {"dense_last": pair.takes == "fields"})
    names = [feature.name for feature in schema.sparse]
    return dense, KeyedJaggedTensor(names, torch.cat(ids), lengths=torch.cat(lengths)), written


def theirs(
    name: str, state: Mapping[str, torch.Tensor], python: str, places: Mapping[str, Path]
) -> torch.Tensor:
    """The logits of the peer's model with these weights, float32 [B, L]."""
    pair = PAIRS[name]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        np.savez(place / "samples.npz", **samples_of(pair)[2])
        own: dict[str, Any] = {name: weight.detach().numpy() for name, weight in state.items()}
        np.savez(place / "state.npz", **own)
        what = {"model": pair.named, "arguments": pair.arguments, "state": str(place / "state.npz")}
        files = (place / "samples.npz", place / "scores.npy")
        result_of(PEERS[pair.peer].command(python, places, *files, what | {"epochs": 0}))
        return torch.from_numpy(np.load(place / "scores.npy")).float().view(SAMPLES, -1)


def ours(name: str, model: nn.Module) -> torch.Tensor:
    """The logits of recpipe's model, float32 [B, L]."""
    dense, sparse, _ = samples_of(PAIRS[name])
    with torch.no_grad():
        found: torch.Tensor = model(dense if dense.shape[1] else torch.ones(SAMPLES, 1), sparse)
    return found


def compared(name: str, python: str, places: Mapping[str, Path]) -> Compared:
    """Logits over samples."""
    pair, model = PAIRS[name], model_of(name)
    state = pair.weights(dict(model.named_parameters()))
    found, wanted = ours(name, model), theirs(name, state, python, places)
    return Compared(pair.peer, float((found - wanted).abs().max()), float(found.std()), pair.differs)


def main(words: Sequence[str] | None = None) -> None:
    """Compare all whose checkouts are there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_checkouts(parser)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--models", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    places, there = places_of(options), list[str]()
    for name in options.models:
        if absent := PEERS[PAIRS[name].peer].absent(places):
            print(f"{name} is left out: there is no {absent}", flush=True)
        else:
            there.append(name)
    tell(((name, compared(name, options.python, places)) for name in there), options.json)


if __name__ == "__main__":
    main()
