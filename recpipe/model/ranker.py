"""The model: TorchRec's DLRM over any collection of tables, with its dense part callable on its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, cast

import torch
from annotated_types import Interval, MinLen, MultipleOf
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recpipe.backend.dense import interact, mlp
from recpipe.data.batch import Batch
from recpipe.embedding.capabilities import SendsAhead
from recpipe.embedding.collection import TableCollection
from recpipe.embedding.shard import Sent
from recpipe.model.matmul import has_onednn
from recpipe.phases import phase, ranged
from recpipe.validation import FilePath, Positive, one_of

Sizes = Annotated[list[Annotated[int, Interval(ge=1, le=2**31 - 1)]], MinLen(1)]
"""Widths of an MLP's layers."""


@dataclass(frozen=True)
class ModelConfig:
    """``conf/model``: sizes of hidden layers; the bottom MLP ends in ``embedding_dim``, the top one in 1."""

    name: Annotated[str, one_of("dlrm", "dlrm_dcn")]
    embedding_dim: Annotated[int, Interval(ge=4, le=2**20), MultipleOf(4)]
    """A multiple of 4, for FBGEMM's kernels."""
    bottom: Sizes
    top: Sizes
    cross_layers: Positive = 3
    cross_rank: Positive = 64
    pretrained: FilePath | None = None
    """A safetensors file to start from, as ``recpipe unshard`` writes it."""
    precision: Annotated[str, one_of("float32", "bfloat16")] = "float32"
    """What the dense part multiplies matrices in while it trains; weights stay float32."""
    emulate_bfloat16: bool = False
    """Whether bfloat16 is wanted on a CPU without units for it, too."""


class Ranker(nn.Module):
    """A DLRM whose tables and dense part can be run apart.

    ``embeddings`` is any module with the interface of TorchRec's ``EmbeddingBagCollection``. Without dense
    features the bottom MLP's input is one constant 1, and its output one learned vector for all samples: its
    products with the pooled rows weigh each feature for itself.
    """

    def __init__(
        self, config: ModelConfig, embeddings: TableCollection, dense_features: int, device: torch.device
    ) -> None:
        super().__init__()
        self.low_precision = config.precision == "bfloat16"
        self.fused = device.type == "cpu" and has_onednn()
        """Whether the dense part runs by ``recpipe.backend.dense`` instead of TorchRec's modules."""
        collection = cast(EmbeddingBagCollection, embeddings)
        self._has_dense = dense_features > 0
        dense_features = max(1, dense_features)
        bottom = [*config.bottom, config.embedding_dim]
        top = [*config.top, 1]
        if config.name == "dlrm":
            self.dlrm = DLRM(collection, dense_features, bottom, top, dense_device=device)
        else:
            self.dlrm = DLRM_DCN(
                collection,
                dense_features,
                bottom,
                top,
                config.cross_layers,
                config.cross_rank,
                dense_device=device,
            )
        for part in (self.dlrm.dense_arch, self.dlrm.inter_arch, self.dlrm.over_arch):
            part.to(device)
        self._bottom, self._top = _linear(self.dlrm.dense_arch), _linear(self.dlrm.over_arch)
        self._takes_room = self.fused and config.name == "dlrm"

    @property
    def embeddings(self) -> TableCollection:
        """The collection of tables."""
        module: TableCollection = self.dlrm.sparse_arch.embedding_bag_collection
        return module

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits float32 [B]."""
        return self.score(batch.dense, self.pooled(batch.sparse))

    def pooled(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled embeddings float32 [B, F * dim], features in the model's order; or [B, (1 + F) * dim] with
        room for the dense vector in front, where collection and model can.

        TorchRec's ``SparseArch`` cuts them apart by name and joins them again, which is needed only
        where a sharded collection returns them in another order.
        """
        with phase("embedding forward"):
            roomy = self.embeddings.pooled_with_room(sparse) if self._takes_room else None
            return self._joined(self.embeddings(sparse)) if roomy is None else roomy

    def send(self, sparse: KeyedJaggedTensor) -> Sent:
        """Start to send the ids of a batch over the ranks; ``arrived`` then gives its ``pooled`` rows."""
        sent: Sent = self._sharded.start(sparse)
        return sent

    def arrived(self, sent: Sent) -> torch.Tensor:
        """Pooled embeddings of what ``send`` sent."""
        with phase("embedding forward"):
            return self._joined(self._sharded.finish(sent))

    @property
    def _sharded(self) -> SendsAhead:
        sharded = self.embeddings.offers(SendsAhead)
        assert sharded is not None, "no batch is sent otherwise"
        return sharded

    def _joined(self, keyed: KeyedTensor) -> torch.Tensor:
        names = self.dlrm.sparse_arch.sparse_feature_names
        if keyed.keys() == names:
            values: torch.Tensor = keyed.values()
            return values
        by_name = keyed.to_dict()
        return torch.cat([by_name[name] for name in names], dim=1)

    def score(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Logits float32 [n] from dense features [n, D] and pooled embeddings as ``pooled`` gives them."""
        return self.top(self.bottom(dense), pooled)

    def bottom(self, dense: torch.Tensor) -> torch.Tensor:
        """The bottom MLP's output [n, dim], which needs no table."""
        if not self._has_dense:
            return self._bottom_mlp(dense.new_ones((1, 1))).expand(len(dense), -1)
        return self._bottom_mlp(dense)

    def _bottom_mlp(self, dense: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return mlp(dense, self._bottom, True, self.dtype)
        with self._autocast(dense):
            return ranged("MLP", self.dlrm.dense_arch, dense)

    def top(self, bottom: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Logits float32 [n] from what ``bottom`` and ``pooled`` gave."""
        crossed = self._cross(bottom, pooled)
        if self.fused:
            logits = mlp(crossed, self._top, False, self.dtype)
        else:
            with self._autocast(crossed):
                logits = ranged("MLP", self.dlrm.over_arch, crossed)
        return logits.squeeze(1).float()

    def _cross(self, bottom: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """The interaction of the dense vector with the pooled rows."""
        dim = bottom.shape[1]
        if self.fused and not isinstance(self.dlrm, DLRM_DCN):
            features = len(self.dlrm.sparse_arch.sparse_feature_names)
            return interact(bottom, pooled, room=pooled.shape[1] == (1 + features) * dim)
        with self._autocast(bottom):
            return ranged("interaction", self.dlrm.inter_arch, bottom, pooled.view(len(bottom), -1, dim))

    @property
    def dtype(self) -> torch.dtype:
        """What the dense part multiplies matrices in."""
        return torch.bfloat16 if self.low_precision else torch.float32

    def _autocast(self, tensor: torch.Tensor) -> torch.autocast:
        return torch.autocast(tensor.device.type, torch.bfloat16, enabled=self.low_precision)

    @cached_property
    def dense_flops(self) -> int:
        """Of a sample's matrix products, forward and backward; the interaction of a DLRM left out."""
        once = () if self._has_dense else ("dense_arch.",)
        named = self.dense_parameters().items()
        return 6 * sum(p.numel() for name, p in named if p.ndim == 2 and not name.startswith(once))

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Everything that the dense optimizer trains; the tables train themselves in their backward pass."""
        return {n: p for n, p in self.dlrm.named_parameters() if not n.startswith("sparse_arch.")}


def _linear(arch: nn.Module) -> list[nn.Linear]:
    """The layers of one of TorchRec's MLPs, in order."""
    return [module for module in arch.modules() if isinstance(module, nn.Linear)]
