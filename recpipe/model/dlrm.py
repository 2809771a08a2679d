"""recpipe's own models, TorchRec's DLRM and DLRM_DCN over a table for each sparse feature, and their sizes:
plain values in a checkpoint, from which the model can be made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.saved import Damaged
from recpipe.data.dataset import Dataset
from recpipe.data.schema import Schema
from recpipe.model.config import ModelConfig, UserModel
from recpipe.model.dropout import dropping
from recpipe.private_api import module_name

CPU, META = torch.device("cpu"), torch.device("meta")


class ProjectedSparseArch(nn.Module):
    """Rows of tables of several dimensions, each projected to ``dim`` where it has another: float32 [B, F,
    dim]. A table's features share its projection, a matrix on ``device``."""

    def __init__(self, collection: EmbeddingBagCollection, dim: int, device: torch.device) -> None:
        super().__init__()
        self.embedding_bag_collection = collection
        configs = collection.embedding_bag_configs()
        self.projections = nn.ModuleDict(
            {
                c.name: nn.Linear(c.embedding_dim, dim, bias=False, device=device)
                for c in configs
                if c.embedding_dim != dim
            }
        )
        self._tables = {feature: c.name for c in configs for feature in c.feature_names}

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """float32 [B, F, dim]."""
        pooled = self.embedding_bag_collection(features).to_dict()
        rows = []
        for name, table in self._tables.items():
            rows.append(self.projections[table](pooled[name]) if table in self.projections else pooled[name])
        return torch.stack(rows, dim=1)


@dataclass(frozen=True)
class DlrmSizes:
    """The sizes of a DLRM or DLRM_DCN; ``tables``: names and rows, in the order of the interaction;
    ``features``: those of tables that several share, or of another name; ``means``: tables whose rows are
    averaged; ``dims``: of tables whose rows are projected to ``embedding_dim``; ``weighted``: ids have
    weights, which say what a mean is."""

    name: Literal["dlrm", "dlrm_dcn"]
    embedding_dim: int
    bottom: list[int]
    top: list[int]
    cross_layers: int
    cross_rank: int
    dense_features: int
    tables: list[tuple[str, int]]
    labels: int = 1
    """The number of outputs."""
    features: dict[str, list[str]] = field(default_factory=dict)
    means: list[str] = field(default_factory=list)
    dims: dict[str, int] = field(default_factory=dict)
    weighted: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        layers = [*self.bottom, *self.top, self.cross_layers, self.cross_rank]
        if (
            min(
                self.embedding_dim,
                self.labels,
                *layers,
                *self.dims.values(),
                *(rows for _, rows in self.tables),
            )
            < 1
            or self.dense_features < 0
        ):
            raise Damaged("model has a size below 1")

    @classmethod
    def of(cls, config: ModelConfig, schema: Schema) -> DlrmSizes:
        """The sizes by a recipe and the data's columns."""
        return cls(
            "dlrm" if config.name == "dlrm" else "dlrm_dcn",
            config.embedding_dim,
            list(config.bottom),
            list(config.top),
            config.cross_layers,
            config.cross_rank,
            len(schema.dense),
            [(name, own[0].rows) for name, own in schema.tables.items()],
            max(1, len(schema.labels)),
            {
                name: found
                for name, own in schema.tables.items()
                if (found := [feature.name for feature in own]) != [name]
            },
            [] if schema.weighted else [n for n, own in schema.tables.items() if own[0].pooling == "mean"],
            {
                name: own[0].dim
                for name, own in schema.tables.items()
                if own[0].dim not in (None, config.embedding_dim)
            },
            schema.weighted,
            config.dropout,
        )


def sizes_of(config: ModelConfig | UserModel, dataset: Dataset) -> dict[str, Any] | None:
    """The sizes to save in a checkpoint, as plain values; None if the model is not one of recpipe's own."""
    return asdict(DlrmSizes.of(config, dataset.known_schema())) if isinstance(config, ModelConfig) else None


def make_dlrm(
    sizes: DlrmSizes,
    device: torch.device,
    tables: torch.device = META,
    init: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> DLRM:
    """Make the model of these ``sizes``, with its dense part on ``device``. Tables that are not on the meta
    device are uninitialized. The dense part begins with the same values on every device.

    Without dense features the bottom MLP's input is a constant 1 (``Batch.dense_features``), and its output
    is one learned vector for all samples, whose products with the pooled rows weight each feature.

    Tables of other dimensions than ``embedding_dim`` are projected to it. ``init``: the tables' initialiser;
    None: TorchRec's.
    """
    dim = sizes.embedding_dim
    # A module cannot have every name that a table can have.
    configs = [
        EmbeddingBagConfig(
            name=module_name(name),
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=sizes.features.get(name, [name]),
            pooling=PoolingType.MEAN if name in sizes.means else PoolingType.SUM,
            init_fn=init,
        )
        for name, rows in sizes.tables
    ]
    collection = EmbeddingBagCollection(configs, is_weighted=sizes.weighted, device=META)
    if tables != META and not sizes.dims:
        collection = collection.to_empty(device=tables)
    # A GPU draws other random numbers than a CPU.
    drawn_on = CPU if device.type == "cuda" else device
    dense, bottom, top = max(1, sizes.dense_features), [*sizes.bottom, dim], [*sizes.top, sizes.labels]
    if sizes.name == "dlrm":
        model = DLRM(collection, dense, bottom, top, dense_device=drawn_on)
    else:
        layers, rank = sizes.cross_layers, sizes.cross_rank
        model = DLRM_DCN(collection, dense, bottom, top, layers, rank, dense_device=drawn_on)
    if sizes.dims:
        for (name, _), config in zip(sizes.tables, configs, strict=True):
            config.embedding_dim = sizes.dims.get(name, dim)
        own = EmbeddingBagCollection(configs, is_weighted=sizes.weighted, device=META)
        if tables != META:
            own = own.to_empty(device=tables)
        model.sparse_arch = ProjectedSparseArch(own, dim, drawn_on)
        model.sparse_arch.projections.to(device)
    if sizes.dropout:
        model.dense_arch.model = dropping(model.dense_arch.model, sizes.dropout, last=False)
        model.over_arch.model[0] = dropping(model.over_arch.model[0], sizes.dropout)
    for name, part in model.named_children():
        if name != "sparse_arch":
            part.to(device)
    return model
