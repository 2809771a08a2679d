"""recpipe's own models: TorchRec's DLRM and DLRM_DCN over a table for each sparse feature."""

from __future__ import annotations

import torch
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.model.sizes import DlrmSizes
from recpipe.seams import module_name

CPU, META = torch.device("cpu"), torch.device("meta")


def make_dlrm(sizes: DlrmSizes, device: torch.device, tables: torch.device = META) -> DLRM:
    """Make the model of these ``sizes``, with its dense part on ``device``. Tables that are not on the meta
    device are uninitialized. The dense part begins with the same values on every device.

    Without dense features the bottom MLP's input is a constant 1 (``Batch.dense_features``), and its output
    is one learned vector for all samples, whose products with the pooled rows weight each feature.
    """
    dim = sizes.embedding_dim
    # A module cannot have every name that a table can have.
    configs = [
        EmbeddingBagConfig(
            name=module_name(name), embedding_dim=dim, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in sizes.tables
    ]
    collection = EmbeddingBagCollection(configs, device=META)
    if tables != META:
        collection = collection.to_empty(device=tables)
    # A GPU draws other random numbers than a CPU.
    drawn_on = CPU if device.type == "cuda" else device
    dense, bottom, top = max(1, sizes.dense_features), [*sizes.bottom, dim], [*sizes.top, 1]
    if sizes.name == "dlrm":
        model = DLRM(collection, dense, bottom, top, dense_device=drawn_on)
    else:
        layers, rank = sizes.cross_layers, sizes.cross_rank
        model = DLRM_DCN(collection, dense, bottom, top, layers, rank, dense_device=drawn_on)
    for name, part in model.named_children():
        if name != "sparse_arch":
            part.to(device)
    return model
