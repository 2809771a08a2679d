"""Sizes of recpipe's own models as a checkpoint has them: plain values, by which the model is made again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.data.batch import Batch
from recpipe.data.dataset import Schema
from recpipe.embedding.tables import module_name
from recpipe.model.ranker import ModelConfig
from recpipe.saved import Damaged


@dataclass(frozen=True)
class DlrmSizes:
    """A DLRM or DLRM_DCN; ``tables``: name and rows, in the order of the interaction."""

    name: Literal["dlrm", "dlrm_dcn"]
    embedding_dim: int
    bottom: list[int]
    top: list[int]
    cross_layers: int
    cross_rank: int
    dense_features: int
    tables: list[tuple[str, int]]

    def __post_init__(self) -> None:
        layers = [*self.bottom, *self.top, self.cross_layers, self.cross_rank]
        if (
            min(self.embedding_dim, *layers, *(rows for _, rows in self.tables)) < 1
            or self.dense_features < 0
        ):
            raise Damaged("model has a size below 1")

    @classmethod
    def of(cls, config: ModelConfig, schema: Schema) -> DlrmSizes:
        """Those of a recipe over the data's columns."""
        return cls(
            "dlrm" if config.name == "dlrm" else "dlrm_dcn",
            config.embedding_dim,
            list(config.bottom),
            list(config.top),
            config.cross_layers,
            config.cross_rank,
            len(schema.dense),
            [(feature.name, feature.rows) for feature in schema.sparse],
        )

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text, lists and tuples alone."""
        return asdict(self)


class PlainDlrm(nn.Module):
    """TorchRec's own DLRM, ``dlrm``, with all tables in a plain ``EmbeddingBagCollection``.

    The tables have no values before they are loaded.
    """

    def __init__(self, sizes: DlrmSizes, device: torch.device) -> None:
        super().__init__()
        # A table's module cannot have every name that a table can.
        configs = [
            EmbeddingBagConfig(
                name=module_name(name),
                embedding_dim=sizes.embedding_dim,
                num_embeddings=rows,
                feature_names=[name],
            )
            for name, rows in sizes.tables
        ]
        tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta")).to_empty(device=device)
        bottom, top = [*sizes.bottom, sizes.embedding_dim], [*sizes.top, 1]
        self.has_dense = sizes.dense_features > 0
        features = max(1, sizes.dense_features)
        if sizes.name == "dlrm":
            self.dlrm = DLRM(tables, features, bottom, top, dense_device=device)
        else:
            layers, rank = sizes.cross_layers, sizes.cross_rank
            self.dlrm = DLRM_DCN(tables, features, bottom, top, layers, rank, dense_device=device)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits float32 [B]; without dense features the bottom MLP's input is a constant 1."""
        dense = batch.dense if self.has_dense else batch.dense.new_ones((batch.size, 1))
        logits: torch.Tensor = self.dlrm(dense, batch.sparse).squeeze(1)
        return logits
