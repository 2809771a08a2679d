"""``Reader``: events as a trained model sees them, mini-batch by mini-batch: its logits, labels, and what
effects learn by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recpipe.answers.export import LastLayer
from recpipe.answers.trained import Scoring, Trained, scored
from recpipe.errors import UserError, did_you_mean
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin import Batch
from recpipe.tables.proxy import handing_out
from recpipe_lambda_learner.effects import EffectConfig, Seen
from recpipe_lambda_learner.posterior import Floats
from recpipe_lambda_learner.rows import Entities

INTERCEPT, LAST_LAYER = "intercept", "last_layer"


class MiniBatch(NamedTuple):
    """N events in the order of time."""

    seen: list[Seen]
    """By each effect."""
    clicks: Floats
    """0 or 1, float64 [N]."""
    weights: Floats
    """float64 [N]."""
    offsets: Floats
    """The model's logits, float64 [N]."""


class Reader:
    """Scores batches by ``trained`` and keeps what ``effects`` learn by.

    ``UserError`` for a model without a logit of clicks, or an effect that the columns do not allow.
    """

    def __init__(self, trained: Trained, effects: Sequence[EffectConfig]) -> None:
        self.trained, self.effects = trained, effects
        tasks = trained.called.tasks
        if [task.kind for task in tasks.values()] != ["clicks"]:
            raise UserError(
                f"{trained.directory}: task=lambda corrects the logit of one label of clicks, and this model "
                f"gives {', '.join(f'{n} ({t.kind})' for n, t in tasks.items())}"
            )
        names = [effect.entity for effect in effects]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"lambda.effects: '{twice}' is there twice; put the inputs of both together")
        schema = trained.schema
        sparse = [feature.name for feature in schema.sparse]
        for effect in effects:
            if effect.entity not in sparse:
                raise UserError(
                    f"lambda.effects: there is no sparse column '{effect.entity}'; "
                    f"there are {', '.join(sparse)}.{did_you_mean(effect.entity, sparse)}"
                )
            for known in effect.inputs:
                names = [INTERCEPT, LAST_LAYER, *schema.dense, *sparse]
                if known not in names:
                    raise UserError(
                        f"lambda.effects: '{known}' is no input of {effect.entity}'s effect; there are "
                        f"{', '.join(names)}.{did_you_mean(known, names)}"
                    )

    def read(self, scoring: Scoring, batches: Iterable[Any]) -> Iterator[MiniBatch]:
        """One mini-batch for each of ``batches``, whose ids are as the data have them: of tables that grow,
        an id that the model does not know is an entity like any other."""
        with ExitStack() as hooks:
            passed = _Passed(scoring.model, hooks, any(LAST_LAYER in e.inputs for e in self.effects))
            for given in batches:
                assert isinstance(given, Batch)
                passed.begin()
                (batch,) = scoring.checked([given])
                with torch.no_grad(), handing_out(scoring.model.look_up(batch)):
                    (own,) = scored(scoring.model.called, [batch])
                assert own.labels is not None
                labels, weights = own.labels.double().numpy(), own.weights
                yield MiniBatch(
                    [Seen(self._entities(e, given), self._inputs(e, batch, passed)) for e in self.effects],
                    labels,
                    np.ones(len(labels)) if weights is None else weights.double().numpy(),
                    own.scores.double().numpy(),
                )

    def _entities(self, effect: EffectConfig, batch: Batch) -> Entities:
        ids = batch.sparse[effect.entity]
        if not bool((ids.lengths() == 1).all()):
            raise UserError(
                f"lambda.effects: '{effect.entity}' has not one id in each event, so that no event is one "
                "entity's; choose another column"
            )
        entities: Entities = ids.values().to(torch.int64).cpu().numpy()
        return entities

    def _inputs(self, effect: EffectConfig, batch: Batch, passed: _Passed) -> Floats:
        columns, dense = list[torch.Tensor](), self.trained.schema.dense
        for name in effect.inputs:
            if name == INTERCEPT:
                columns.append(torch.ones(batch.size, 1))
            elif name == LAST_LAYER:
                columns.append(passed.last_layer())
            elif name in dense:
                columns.append(batch.dense[:, [dense.index(name)]])
            else:
                columns.append(passed.row(name))
        return torch.cat([column.double().cpu() for column in columns], 1).numpy()


class _Passed:
    """What the latest forward pass of ``model`` has computed, while ``hooks`` is open."""

    def __init__(self, model: PlacedModel, hooks: ExitStack, layers: bool) -> None:
        self.begin()
        for proxy in model.proxies.values():
            hooks.callback(proxy.register_forward_hook(self._looked_up).remove)
        self._last = LastLayer(model.module) if layers else None
        if self._last is not None:
            hooks.callback(self._last.remove)

    def begin(self) -> None:
        """Forget the pass before."""
        self._rows: dict[str, torch.Tensor] = {}

    def _looked_up(self, module: nn.Module, given: Any, found: Any) -> None:
        if isinstance(found, KeyedTensor):
            self._rows |= found.to_dict()
        elif isinstance(found, Mapping):
            for name, rows in found.items():
                if isinstance(rows, JaggedTensor) and bool((rows.lengths() == 1).all()):
                    self._rows[name] = rows.values()

    def row(self, feature: str) -> torch.Tensor:
        """float32 [B, D]: the pooled row of ``feature``."""
        if feature not in self._rows:
            raise UserError(
                f"lambda.effects: the model looks up no row of '{feature}' for each event (a history has "
                "several); leave it out of inputs"
            )
        return self._rows[feature]

    def last_layer(self) -> torch.Tensor:
        """float32 [B, D]: what the last linear layer with one output was given."""
        assert self._last is not None
        return self._last.given()
