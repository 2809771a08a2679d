"""``conf/model``, typed: recpipe's own models, and models of a user or an installed package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval, MinLen
from pydantic import AfterValidator
from torch import nn

from recpipe.common.validation import (
    Dimension,
    FieldError,
    FilePath,
    Positive,
    Text,
    chosen,
    fitted,
    mapping,
    one_of,
    typed_part,
)
from recpipe.common.words import CUSTOM
from recpipe.errors import UserError
from recpipe.plugin.conf import TARGET
from recpipe.plugin.offers import is_offered, offered

Sizes = Annotated[list[Annotated[int, Interval(ge=1, le=2**31 - 1)]], MinLen(1)]
"""Widths of an MLP's layers."""
Dropout = Annotated[float, Interval(ge=0, lt=1)]
"""Which share of a hidden layer's values training sets to zero."""
Precision = Annotated[str, one_of("float32", "tf32", "bfloat16")]

Spread = Annotated[float, Interval(ge=0)]
"""How far from 0 the first values of tables are: their standard deviation, or their bound."""

TaskWeights = dict[str, Annotated[float, Interval(ge=0)]] | Literal["uncertainty"]


def _importable(path: str) -> str:
    if len(path.split(".")) < 2 or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError("is no path to a class: write package.module.Class")
    return path


@dataclass(frozen=True)
class ModelConfig:
    """``conf/model``: sizes of hidden layers. The bottom MLP's output has ``embedding_dim`` values, the top
    one's has 1."""

    name: Annotated[str, one_of("dlrm", "dlrm_dcn")]
    embedding_dim: Dimension
    bottom: Sizes
    top: Sizes
    cross_layers: Positive = 3
    cross_rank: Positive = 64
    loss: Text | dict[str, Any] | None = None
    """A name of ``recpipe.model.loss``, such a name with its arguments, a ``_target_`` with its arguments, or
    one of these for each label; None: the loss of each label's kind."""
    task_weights: TaskWeights | None = None
    """What the losses of several labels are multiplied by in their sum, 1 of those that are not named; or
    ``uncertainty``: these are learnt."""
    pretrained: FilePath | None = None
    """A safetensors file to start from, as ``recpipe unshard`` writes it."""
    dropout: Dropout = 0.0
    """After each hidden layer of both MLPs."""
    table_init_std: Spread | None = None
    """The tables' first values are normal, with this standard deviation; None: see ``table_init_bound``."""
    table_init_bound: Spread | None = None
    """They are uniform in +- this; None, and no ``table_init_std``: in +-sqrt(1 / rows)."""
    precision: Precision = "float32"
    """The type of the dense part's matrix products; weights stay float32."""
    emulate_bfloat16: bool = False
    """Whether to use bfloat16 also on a CPU without units for it."""

    def __post_init__(self) -> None:
        table_init(self)


BUILT_IN = {"dlrm": ModelConfig, "dlrm_dcn": ModelConfig}
"""recpipe's own models by name."""


@dataclass(frozen=True)
class ModelKeys:
    """``conf/model/custom.yaml``: the keys that recpipe itself reads in the section of any other model."""

    name: Text = CUSTOM
    embedding_dim: Dimension | None = None
    """The dimension of the tables that recpipe makes; None: the model makes its own."""
    loss: Text | dict[str, Any] | None = None
    """As in ``ModelConfig``."""
    task_weights: TaskWeights | None = None
    labels: Text = "labels"
    """Dotted path of the labels in a batch."""
    label_weights: Text | None = None
    """Dotted path of the labels' weights in a batch of a type of the user's own; None: it has none."""
    prediction: Text | None = None
    """Key, attribute or position of the prediction in the model's output; None: recpipe finds it."""
    pretrained: FilePath | None = None
    table_init_std: Spread | None = None
    """As in ``ModelConfig``, of the tables that recpipe makes."""
    table_init_bound: Spread | None = None
    precision: Precision = "float32"
    emulate_bfloat16: bool = False

    def __post_init__(self) -> None:
        table_init(self)


@dataclass(frozen=True)
class UserModel(ModelKeys):
    """A class of the user or of an installed package, with its arguments."""

    target: str | None = None
    """``model._target_``: the class's import path; None: the class is that of the entry point ``name``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The section's other keys, which are the constructor's arguments."""

    @property
    def said(self) -> str:
        """How the recipe chose the model, for messages."""
        return f"model={self.name}" if self.target is None else f"model.{TARGET}={self.target}"


def table_init(config: ModelConfig | ModelKeys) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the recipe says of the first values of tables, as ``init_fn`` of TorchRec's configs; None:
    nothing. ``FieldError`` if it says two things."""
    std, bound = config.table_init_std, config.table_init_bound
    if std is not None and bound is not None:
        raise FieldError(
            f"table_init_bound={bound}: model.table_init_std={std} says another thing of the tables' first "
            "values: set one of the two to null"
        )
    if std is not None:
        return partial(nn.init.normal_, std=std)
    return None if bound is None else partial(nn.init.uniform_, a=-bound, b=bound)


_OF_OTHERS = {f.name for f in fields(ModelKeys)} - {f.name for f in fields(ModelConfig)}
"""Keys that recpipe's own models lack."""


def parse_model(values: object) -> ModelConfig | UserModel:
    """The ``model`` section, typed; ``UserError`` names the first wrong key. Nothing is imported."""
    section = dict(mapping(values, "model"))
    target, name = section.pop(TARGET, None), section.get("name")
    if target is not None:
        target = fitted(Annotated[str, AfterValidator(_importable)], target, f"model.{TARGET}")
    elif name != CUSTOM and (name in [*BUILT_IN] or not is_offered("model", name)):
        if foreign := _OF_OTHERS & section.keys():
            raise UserError(
                f"model.{min(foreign)} goes with a class of your own, model.{TARGET}=package.Class; "
                f"{' and '.join(BUILT_IN)} have an output for each label"
            )
        return chosen(BUILT_IN, section, "model", also=offered("model"))
    keys, arguments = typed_part(ModelKeys, section, "model")
    return UserModel(**vars(keys), target=target, arguments=arguments)


Level = Annotated[float, Interval(gt=0, lt=1)]


@dataclass(frozen=True)
class MetricsConfig:
    """``conf/metrics``: what is told of evaluations beside the figures that every one has."""

    group: Text | None = None
    """The column by whose values samples belong together: GAUC and ranking metrics are of each group."""
    k: Annotated[list[Positive], MinLen(1)] = field(default_factory=lambda: [10])
    """Where the ranking metrics end."""
    slices: list[Text] = field(default_factory=list)
    """Columns by whose values samples are told apart as well."""
    slice_values: Positive = 10
    """How many of each column's values have a line of their own; of a dense column, buckets."""
    intervals: Level | None = 0.95
    """The level of the intervals of figures; None: there are none."""
    recalibrate: Annotated[str, one_of("platt", "isotonic")] | None = None
    """How clicks are recalibrated, by half of the samples, for figures of the other half."""
