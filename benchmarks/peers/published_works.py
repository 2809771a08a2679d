"""What ``published.py`` trains: recpipe's models beside those of other projects, each on a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from published_peers import FUXICTR, GRUS, RANKERS, TBSM, TORCHREC


@dataclass(frozen=True)
class Work:
    """A model on a data set, under both names."""

    data: str
    recipe: tuple[str, ...]
    named: str
    """The peer's model."""
    arguments: Mapping[str, Any]
    every: int = 1
    """Of how many rows of the file one is taken."""
    peer: str = FUXICTR
    model: str = ""
    """The name in ``conf/model``, where the work has another."""
    epochs: int = 1
    title: str = ""
    """In the table; empty: the peer's name of the model."""
    rows: str = ""
    """What it is trained on, in the table; empty: the data set's name."""
    beside: str = "FuxiCTR"
    """The peer, in the table."""


CRITEO = ("model.embedding_dim=16",)
HISTORY = 20
HISTORIES = ("model.embedding_dim=16", f"model.history={HISTORY}")
CLICKS = ("data.negatives.sampling=popularity", "data.negatives.ratio=4", "data.negatives.alpha=0.75")
TOWERS = (
    *("model.embedding_dim=16", "model.query_layers=[64,32]", "model.candidate_layers=[64,32]"),
    *("model.retrieval=false", "model.normalize=false", "model.loss=binary_cross_entropy"),
    *CLICKS,
)
CATEGORIES = (
    "{name: category, ids: vocabulary}, {name: categories, kind: sequence, column: category_history, "
    "table: before, ids: vocabulary}"
)
RANKED = (
    *HISTORIES,
    *CLICKS,
    "data.negatives.feature=category",
    "data.negatives.along=[]",
    "data.features.features=[{name: category, ids: vocabulary}, {name: categories, kind: sequence, column: "
    "category_history, table: category, ids: vocabulary}]",
)
"""Categories alone, for RecBole's SASRec has one id an event, and next items are new to training."""
RETAIL = ("model.embedding_dim=16", "model.expert=[64,32]", "model.tower=[32]", "data.batch_size=512")
TASKS = {"expert_hidden_units": [64, 32], "gate_hidden_units": [], "tower_hidden_units": [32]}
WORKS = {
    "wide_deep": Work(
        "criteo",
        (*CRITEO, "model.hidden=[64,64]"),
        "WideDeep",
        {"hidden_units": [64, 64]},
        title="Wide & Deep",
    ),
    "deepfm": Work("criteo", (*CRITEO, "model.hidden=[64,64]"), "DeepFM", {"hidden_units": [64, 64]}),
    "xdeepfm": Work(
        "criteo",
        (*CRITEO, "model.layers=[16,16]", "model.hidden=[64,64]"),
        "xDeepFM",
        {"cin_hidden_units": [16, 16], "dnn_hidden_units": [64, 64]},
    ),
    "dcnv2": Work(
        "criteo",
        (*CRITEO, "model.layers=3", "model.rank=null", "model.structure=parallel", "model.hidden=[64,64]"),
        "DCNv2",
        {"model_structure": "parallel", "num_cross_layers": 3, "parallel_dnn_hidden_units": [64, 64]},
    ),
    "autoint": Work(
        "criteo",
        (*CRITEO, "model.layers=2", "model.heads=2", "model.width=8", "model.hidden=[64,64]"),
        "AutoInt",
        # FuxiCTR's attention_dim is that of all heads together.
        {"attention_layers": 2, "num_heads": 2, "attention_dim": 16, "dnn_hidden_units": [64, 64]},
    ),
    "finalmlp": Work(
        "criteo",
        (*CRITEO, "model.left=[64,64]", "model.right=[64,64]", "model.gate=[64]", "model.heads=2"),
        "FinalMLP",
        {
            "mlp1_hidden_units": [64, 64],
            "mlp2_hidden_units": [64, 64],
            "fs_hidden_units": [64],
            "num_heads": 2,
        },
    ),
    "masknet": Work(
        "criteo",
        (*CRITEO, "model.blocks=[64,64]", "model.reduction_ratio=1"),
        "MaskNet",
        {"model_type": "SerialMaskNet", "dnn_hidden_units": [64, 64], "reduction_ratio": 1},
    ),
    "wukong": Work(
        "criteo",
        (
            *CRITEO,
            "model.layers=2",
            "model.products=8",
            "model.mixtures=8",
            "model.rank=8",
            "model.products_hidden=[64]",
            "model.hidden=[64,64]",
        ),
        "WuKong",
        {
            "num_wukong_layers": 2,
            "fmb_features": 8,
            "lcb_features": 8,
            "fmp_rank_k": 8,
            "fmb_mlp_units": [64],
            "mlp_hidden_units": [64, 64],
            "mlp_batch_norm": False,
        },
    ),
    "din": Work(
        "taobao",
        (*HISTORIES, "model.hidden=[64,64]", "model.attention=[64]"),
        "DIN",
        {"dnn_hidden_units": [64, 64], "attention_hidden_units": [64]},
    ),
    "dien": Work(
        "taobao",
        (*HISTORIES, "model.hidden=[64,64]"),
        "DIEN",
        {"dnn_hidden_units": [64, 64], "batch_norm": False, "dien_neg_seq_field": []},
        peer=GRUS,
    ),
    "bst": Work(
        "taobao",
        (*HISTORIES, "model.hidden=[64,64]", "model.heads=2"),
        "BST",
        {"dnn_hidden_units": [64, 64], "num_heads": 2},
    ),
    "tbsm": Work(
        "taobao",
        (*HISTORIES, "model.bottom=[64]", "model.top=[64]", "model.weighting=[64]", "model.hidden=[64]"),
        "TBSM_Net",
        {"bottom": [64], "top": [64], "vector": 16, "weighting": [64], "hidden": [64]},
        peer=TBSM,
        epochs=2,
        title="TBSM",
        beside="Meta",
    ),
    "sasrec": Work(
        "taobao",
        (*RANKED, "model.blocks=2", "model.heads=1"),
        "SASRec",
        {},
        peer=RANKERS,
        title="SASRec",
        rows="Taobao, categories alone",
        beside="RecBole",
    ),
    "hstu": Work(
        "taobao",
        (*RANKED, "model.width=32", "model.units=2", "model.heads=2", "model.hidden=[64]"),
        "DlrmHSTU",
        {"width": 32},
        peer=RANKERS,
        title="HSTU",
        rows="Taobao, categories alone",
        beside="Meta's DlrmHSTU",
    ),
    "two_tower": Work(
        "taobao",
        (
            *TOWERS,
            "model.candidate=[category]",
            "data.negatives.feature=category",
            f"data.features.features=[{CATEGORIES}]",
        ),
        "TwoTower",
        {"layers": [64, 32], "query": "of_categories", "candidate": "of_category"},
        peer=TORCHREC,
        title="Two towers, categories alone",
        beside="TorchRec",
    ),
    "two_tower_dssm": Work(
        "taobao",
        (*TOWERS, "model.candidate=[item,category]", "data.negatives.along=[category]"),
        "DSSM",
        {"user_tower_units": [64, 32], "item_tower_units": [64, 32], "items": ["of_item", "of_category"]},
        model="two_tower",
        title="Two towers",
        beside="FuxiCTR's DSSM",
    ),
    "shared_bottom": Work(
        "online_retail",
        ("model.embedding_dim=16", "model.bottom=[64,32]", "model.tower=[32]", "data.batch_size=512"),
        "ShareBottom",
        {"bottom_hidden_units": [64, 32], "tower_hidden_units": [32]},
        every=8,
        title="Shared bottom",
    ),
    "mmoe": Work(
        "online_retail",
        (*RETAIL, "model.experts=4"),
        "MMoE",
        {"num_experts": 4, **TASKS},
        every=8,
    ),
    "ple": Work(
        "online_retail",
        (*RETAIL, "model.layers=2", "model.own_experts=2", "model.shared_experts=2"),
        "PLE",
        {"num_layers": 2, "num_specific_experts": 2, "num_shared_experts": 2, **TASKS},
        every=8,
    ),
}
"""By the names of ``conf/model``."""
