"""recpipe's own models: TorchRec's DLRM and DLRM_DCN over a table for each sparse feature."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.data.dataset import Schema
from recpipe.embedding.tables import module_name
from recpipe.model.config import ModelConfig


def make_dlrm(config: ModelConfig, schema: Schema, device: torch.device) -> nn.Module:
    """The model of ``config``, its tables on the meta device.

    Without dense features the bottom MLP's input is one constant 1 (``Batch.dense_features``), and its output
    one learned vector for all samples: its products with the pooled rows weigh each feature for itself.
    """
    dim = config.embedding_dim
    tables = [
        EmbeddingBagConfig(
            name=module_name(f.name), embedding_dim=dim, num_embeddings=f.rows, feature_names=[f.name]
        )
        for f in schema.sparse
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    dense, bottom, top = max(1, len(schema.dense)), [*config.bottom, dim], [*config.top, 1]
    if config.name == "dlrm":
        model: nn.Module = DLRM(collection, dense, bottom, top, dense_device=device)
    else:
        model = DLRM_DCN(
            collection, dense, bottom, top, config.cross_layers, config.cross_rank, dense_device=device
        )
    for name, part in model.named_children():
        if name != "sparse_arch":
            part.to(device)
    return model
