"""What a user has set on the weights of a model's collections: taken over, or refused in one line.

A front replaces a collection, and its tables' rows are no parameters any more. ``requires_grad`` and attached
optimizers are taken over by each table's optimizer, and first values by its rows. What would be lost is
refused here, with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe import private_api
from recpipe.errors import UserError


def table_weights(path: str, collection: nn.Module, config: BaseEmbeddingConfig) -> nn.Parameter:
    """The weights of a table of ``collection`` (at ``path`` in the model), float32 [rows, D], which may be on
    the meta device.

    ``UserError`` if something is set on them, or on the table's module, that rows in a front's tables would
    not have.
    """
    bags = isinstance(collection, EmbeddingBagCollection)
    tables = collection.embedding_bags if bags else collection.embeddings
    assert isinstance(tables, nn.ModuleDict)
    table, where = tables[config.name], f"{path}.{'embedding_bags' if bags else 'embeddings'}.{config.name}"
    found = dict(table.named_parameters())
    weights = found.get("weight")
    if weights is None or len(found) > 1:
        raise UserError(
            f"{where}.weight is made of {', '.join(found) or 'nothing that is trained'} (a parametrization, "
            "or a module of your own), and recpipe's tables train rows as they are: remove it "
            "(torch.nn.utils.parametrize.remove_parametrizations), or keep the table outside of the "
            "collection"
        )
    fp32 = config.data_type == DataType.FP32
    if not fp32 or weights.dtype != torch.float32:
        kind = weights.dtype if fp32 else config.data_type.name
        raise UserError(
            f"table '{config.name}' of '{path}' is stored as {kind}; recpipe trains tables of FP32: leave "
            "data_type out, and do not convert the collection (plugins such as quantize and neo store rows "
            "in fewer bits)"
        )
    rows, dim = config.num_embeddings, config.embedding_dim
    if tuple(weights.shape) != (rows, dim):
        raise UserError(
            f"{where}.weight is {list(weights.shape)}, and its config says {[rows, dim]}: give the "
            "collection a config with these weights' num_embeddings and embedding_dim"
        )
    if dim % 4:
        raise UserError(
            f"table '{config.name}' of '{path}' has embedding_dim={dim}; FBGEMM's kernels need a "
            "multiple of 4"
        )
    for name, usual in (("max_norm", None), ("padding_idx", None), ("scale_grad_by_freq", False)):
        if getattr(table, name, usual) != usual:
            raise UserError(
                f"{where}.{name} is {getattr(table, name)}, which recpipe's tables do not have: set it to "
                f"{usual}, or keep this table outside of the collection"
            )
    for what, hooked in ((f"{where}.weight", weights), (where, table)):
        if private_api.has_hooks(hooked):
            raise UserError(
                f"a hook is registered on {what}, and the rows of recpipe's tables are updated without a "
                "gradient of the whole table, so that it would never be called: remove it, and change the "
                "gradient of what the collection returns instead (register_hook on its output in forward)"
            )
    return weights


def refuse_shared(model: nn.Module, collections: Mapping[str, nn.Module]) -> None:
    """``UserError`` if weights of a table of ``collections`` (by path) belong to anything else in ``model``,
    too, and are trained: their rows would be trained apart."""
    tables = {
        f"{path}.{name}": parameter
        for path, collection in collections.items()
        for name, parameter in collection.named_parameters(remove_duplicate=False)
    }
    inside = {id(member) for collection in collections.values() for member in collection.modules()}
    others = {
        f"{path}.{name}" if path else name: parameter
        for path, member in model.named_modules()
        if id(member) not in inside
        for name, parameter in member.named_parameters(recurse=False)
    }
    seen: dict[tuple[torch.device, int], str] = {}
    every = tables | others
    for name, parameter in every.items():
        meta = parameter.device.type == "meta"
        memory = parameter.device, id(parameter) if meta else parameter.data_ptr()
        first = seen.setdefault(memory, name)
        trained = parameter.requires_grad or every[first].requires_grad
        if first != name and first in tables and parameter.numel() and trained:
            raise UserError(
                f"{first} and {name} are the same weights, and recpipe's tables would train their rows "
                "apart: let one table of one collection have the features of both (feature_names), or give "
                "each its own weights"
            )
