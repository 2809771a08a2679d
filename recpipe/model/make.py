"""Makes the module of the recipe's model section: finds its class and the arguments that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.common.validation import no_value
from recpipe.common.words import CUSTOM, made_within
from recpipe.data.dataset import Dataset, Schema
from recpipe.errors import UserError, did_you_mean, shown
from recpipe.model.call import Called
from recpipe.model.config import ModelConfig, ModelKeys, UserModel
from recpipe.model.dlrm import make_dlrm
from recpipe.model.loss import parse_loss
from recpipe.model.sizes import DlrmSizes
from recpipe.model.target import locate, told
from recpipe.plugin.conf import TARGET
from recpipe.plugin.offers import entry, imported, offered
from recpipe.seams import module_name

_CPU, _META = torch.device("cpu"), torch.device("meta")
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def make_model(config: UserModel, schema: Schema, device: torch.device) -> nn.Module:
    """Make the module that ``config`` names. Its parameters are moved to ``device``, except those on the meta
    device.

    The class, or the function that makes a module, is called with the recipe's ``arguments``, and with those
    of its other parameters that recpipe knows by name (``docs/guide/models.md``). The caller seeds the random
    numbers. Raises a one-line ``UserError`` if the class cannot be imported or made.
    """
    maker = _maker(config)
    arguments = {key: made_within(value, f"model.{key}") for key, value in config.arguments.items()}
    arguments |= _completed(config, maker, Known(config, schema, device).offers())
    try:
        made = maker(**arguments)
    except UserError:
        raise
    except Exception as fault:
        raise UserError(
            f"{config.said}: its constructor raised {told(fault, getattr(maker, '__module__', ''))}"
        ) from fault
    if not isinstance(made, nn.Module):
        raise UserError(f"{config.said} makes a {type(made).__name__}, not a torch.nn.Module")
    _move(made, device)
    return made


def _move(module: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers that are not on the meta device."""
    move: Callable[..., nn.Module] = module._apply
    move(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def make_called(
    config: ModelConfig | UserModel,
    dataset: Dataset,
    device: torch.device,
    given: nn.Module | None = None,
) -> Called:
    """Make the model of the recipe, or take the one ``given`` by a caller in Python, ready to be called by
    training."""
    if given is not None:
        assert isinstance(config, UserModel), "whoever gives a model chooses model=custom"
        _move(given, device)
        return Called.of(given, config)
    schema = dataset.known_schema()
    if isinstance(config, UserModel):
        return Called.of(make_model(config, schema, device), config)
    module = make_dlrm(DlrmSizes.of(config, schema), device)
    return Called(module, parse_loss("binary_cross_entropy"), low_precision=config.precision == "bfloat16")


class Known:
    """The arguments that recpipe passes to a constructor that has parameters of these names."""

    def __init__(self, config: UserModel, schema: Schema, device: torch.device) -> None:
        self.config, self.schema, self.device = config, schema, device

    def offers(self) -> dict[str, Callable[[], Any]]:
        """The functions that make the arguments, by the parameters' names."""
        return {
            "schema": lambda: self.schema,
            "embedding_dim": self.dimension,
            "embedding_bag_collection": self.bags,
            "embedding_collection": self.sequences,
            "num_dense_features": self.dense_width,
            "dense_in_features": self.dense_width,
            # TorchRec's models draw their first values there, and a GPU draws others than a CPU.
            "dense_device": lambda: _CPU,
            "device": lambda: self.device,
        }

    def dimension(self) -> int:
        """``model.embedding_dim``; ``UserError`` if it is not set."""
        if self.config.embedding_dim is None:
            raise no_value("model.embedding_dim")
        return self.config.embedding_dim

    def dense_width(self) -> int:
        """The number of columns of ``Batch.dense_features``."""
        return max(1, len(self.schema.dense))

    def bags(self) -> EmbeddingBagCollection:
        """A collection with a table for each sparse feature, summed by bag, on the meta device."""
        return EmbeddingBagCollection([EmbeddingBagConfig(**table) for table in self._tables()], device=_META)

    def sequences(self) -> EmbeddingCollection:
        """A collection with a table for each sparse feature and a row for each id, on the meta device."""
        return EmbeddingCollection([EmbeddingConfig(**table) for table in self._tables()], device=_META)

    def _tables(self) -> list[dict[str, Any]]:
        return [
            {
                "name": module_name(feature.name),
                "embedding_dim": self.dimension(),
                "num_embeddings": feature.rows,
                "feature_names": [feature.name],
            }
            for feature in self.schema.sparse
        ]


def _maker(config: UserModel) -> Callable[..., Any]:
    """The class or function of the entry point, or the one that ``_target_`` names."""
    if config.target is None and config.name == CUSTOM:
        raise UserError(f"model={CUSTOM}: say which class, model.{TARGET}=package.module.Class")
    if config.target is None:
        found = imported("model", entry("model", config.name, offered("model")))
    else:
        found = locate(config.target, f"model.{TARGET}")
    a_module = not isinstance(found, type) or issubclass(found, nn.Module)
    if not callable(found) or isinstance(found, nn.Module) or not a_module:
        what = f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise UserError(
            f"{config.said} is {what}: name a class of torch.nn.Module, or a function that makes one"
        )
    return found


def _completed(
    config: UserModel, maker: Callable[..., Any], offers: Mapping[str, Callable[[], Any]]
) -> dict[str, Any]:
    """Add the arguments that the recipe does not set; ``UserError`` for unknown or missing ones."""
    parameters = _parameters(config, maker)
    takes = {name: p for name, p in parameters.items() if p.kind in _BY_NAME}
    for name in _RECPIPES.keys() & takes.keys():
        _refuse_shared(config, name, takes[name])
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [key for key in config.arguments if key not in takes]
    if unknown:
        own = [name for name in takes if name not in offers]
        hint = did_you_mean(unknown[0], [*own, *(f.name for f in fields(ModelKeys))])
        listed = hint or f" It takes {', '.join(own) or 'none from the recipe'}"
        raise UserError(f"model.{shown(unknown[0])}: {config.said} has no such argument.{listed}")
    given = {name: make for name, make in offers.items() if name in takes and name not in config.arguments}
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty
        and (p.kind in _BY_NAME or p.kind is Parameter.POSITIONAL_ONLY)
        and name not in {*config.arguments, *given}
    ]
    if missing:
        sets = " ".join(f"model.{name}=VALUE" for name in missing)
        raise UserError(f"{config.said} needs {', '.join(missing)}, which has no value: set {sets}")
    return {name: make() for name, make in given.items() if _wanted(name, takes[name], config)}


_RECPIPES = {f.name: f.default for f in fields(ModelKeys) if f.name != "embedding_dim"}
"""Keys that recpipe reads itself and does not pass to constructors, with their defaults."""


def _refuse_shared(config: UserModel, name: str, parameter: Parameter) -> None:
    """``UserError`` if a parameter has the name of one of recpipe's own keys and needs a value, or one is set
    that may be meant for it: the parameter would not get it."""
    named = name == "name" and config.target is None  # ``name`` has chosen an installed package's model
    set_ = getattr(config, name) != _RECPIPES[name] and not named
    if set_ or parameter.default is Parameter.empty:
        raise UserError(
            f"model.{name}: recpipe reads this key itself, and {config.said} has a parameter of that name, "
            f"which does not get it. Name a function that makes the model instead: with another name for the "
            f"parameter (def make(its_{name}): return Model({name}=its_{name})), or without it, so that "
            f"model.{name} is recpipe's alone"
        )


def _parameters(config: UserModel, maker: Callable[..., Any]) -> Mapping[str, Parameter]:
    try:
        return signature(maker).parameters
    except (TypeError, ValueError) as fault:
        raise UserError(
            f"{config.said}: Python does not tell its arguments; name a class of your own"
        ) from fault


def _wanted(name: str, parameter: Parameter, config: UserModel) -> bool:
    """Whether to pass a known argument. A parameter with a default keeps it if the recipe does not set the
    dimension."""
    return not (
        name in _OF_DIMENSION and parameter.default is not Parameter.empty and config.embedding_dim is None
    )


_OF_DIMENSION = ("embedding_dim", "embedding_bag_collection", "embedding_collection")
