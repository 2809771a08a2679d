"""Sizes of recpipe's own models in a checkpoint: plain values from which the model can be made again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from recpipe.common.saved import Damaged
from recpipe.data.dataset import Dataset, Schema
from recpipe.model.config import ModelConfig, UserModel


@dataclass(frozen=True)
class DlrmSizes:
    """The sizes of a DLRM or DLRM_DCN; ``tables``: names and rows, in the order of the interaction."""

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
        """The sizes by a recipe and the data's columns."""
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
        """The sizes as numbers, text, lists and tuples."""
        return asdict(self)


def sizes_of(config: ModelConfig | UserModel, dataset: Dataset) -> dict[str, Any] | None:
    """The sizes to save in a checkpoint; None if the model is not one of recpipe's own."""
    return DlrmSizes.of(config, dataset.known_schema()).to_dict() if isinstance(config, ModelConfig) else None
