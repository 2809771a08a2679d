"""Calls any model with a batch and gets a loss and an output."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from recpipe.data.parts import batch_size
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.model.config import UserModel
from recpipe.model.loss import Loss, parse_loss, vector
from recpipe.model.metrics import Kind

LABELS = "labels"
"""The attribute of a batch that has the labels, unless the recipe names another."""
SCORE = "score"
"""The name of a model's only output."""
_WRAPPERS = ("module", "_orig_mod")
"""Attributes in which DistributedModelParallel, DistributedDataParallel and torch.compile keep the module."""


class Called:
    """A module as training calls it: ``called(batch)`` returns the 0-dim loss and the module's output.

    If ``forward`` takes one argument that is not an attribute of the batch, it gets the batch itself;
    otherwise it gets the batch's attributes by name. It returns ``(loss, output)``, as for TorchRec's train
    pipelines, or an output alone, from which ``loss`` computes the loss for the batch's ``labels``.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | Mapping[str, Loss],
        labels: str = LABELS,
        prediction: str | None = None,
        low_precision: bool = False,
    ) -> None:
        self.module = module
        self.loss = loss
        self.labels = labels
        """Dotted path of the labels in a batch; with several losses, of the object that holds the labels by
        name."""
        self.key = prediction
        """Key, attribute or position of the prediction in the output; None: recpipe finds it."""
        self.low_precision = low_precision
        """Whether matrix products are computed in bfloat16."""
        self._parameters = {name: p.default is p.empty for name, p in _named_parameters(module).items()}
        """Of each parameter of ``forward``, whether it must be given."""

    @classmethod
    def of(cls, module: nn.Module, config: UserModel) -> Called:
        """Make ``module`` callable as the recipe says; ``UserError`` for an unknown loss."""
        loss = parse_loss(config.loss)
        return cls(module, loss, config.labels, config.prediction, config.precision == "bfloat16")

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """The loss, a mean over the batch's samples (0 without samples), and the module's output.

        Raises ``UserError`` if batch, module, output and labels do not fit together.
        """
        own, output = self.output(batch)
        if own is not None:
            return (torch.nan_to_num(own) if _is_empty(batch) else own), output
        if isinstance(self.loss, Loss):
            labels = self._labels(batch, self.labels)
            return self.loss(self._predicted(output), labels), output
        if not isinstance(output, Mapping):
            raise UserError(
                f"model.loss has one for each of {', '.join(self.loss)}, so the model must return a mapping "
                f"of these names, not a {type(output).__name__}"
            )
        total: list[torch.Tensor] = []
        for name, loss in self.loss.items():
            if name not in output:
                raise UserError(
                    f"model.loss.{name}: the model returns no '{name}'; {nearest_or_all(name, output)}"
                )
            total.append(loss(output[name], self._labels(batch, f"{self.labels}.{name}")))
        return torch.stack(total).sum(), output

    def judge(self, batch: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """The loss, and the prediction and its labels for the quality figures, float32 [B] each.

        The latter are None if there is not one predicted value and label for each sample and the recipe does
        not say which they are.
        """
        loss, output = self(batch)
        try:
            prediction, labels = self.prediction(output), self.labels_of(batch)
        except UserError:
            if self.key is not None or (isinstance(self.loss, Loss) and self.labels != LABELS):
                raise
            return loss, None
        return loss, ((prediction, labels) if prediction.shape == labels.shape else None)

    @property
    def tasks(self) -> dict[str, Called]:
        """This module for each of its outputs that can be scored, by name; a single one is called ``score``.

        These are the outputs that ``model.loss`` names, or the one that the recipe or recpipe has found.
        """
        if isinstance(self.loss, Loss):
            return {SCORE: self}
        parts = (self.module, self.loss, self.labels)
        return {name: Called(*parts, name, self.low_precision) for name in self.loss}

    def output(self, batch: Any) -> tuple[torch.Tensor | None, Any]:
        """What the module returns: its own loss, if it gives one, and its output. No labels are needed."""
        # Parts of the batch by the names of ``forward``'s parameters, unless it takes the batch itself.
        arguments: dict[str, Any] = {}
        absent, required = list[str](), 0
        for name, must in self._parameters.items():
            part = _part(batch, name)
            if part is not _ABSENT:
                arguments[name] = part
            elif must:
                absent.append(name)
            required += must
        first = next(iter(self._parameters), None)
        takes_batch = (absent or first not in arguments) and required <= 1 and len(absent) == required
        if absent and not takes_batch:
            raise UserError(
                f"{type(self.module).__name__}.forward takes '{absent[0]}', which the batch "
                f"({type(batch).__name__}) does not have; {nearest_or_all(absent[0], _names(batch))}"
            )
        precision: AbstractContextManager[None] = nullcontext()
        if self.low_precision or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            device = next((p.device.type for p in self.module.parameters() if not p.is_meta), "cpu")
            precision = torch.autocast(device, torch.bfloat16, enabled=self.low_precision)
        with precision:
            returned = self.module(batch) if takes_batch else self.module(**arguments)
        if isinstance(returned, list | tuple) and len(returned) == 2 and _is_scalar(returned[0]):
            return returned[0], returned[1]
        if _is_scalar(returned):
            raise UserError(
                "the model returns a loss alone, and quality cannot be measured; return (loss, output)"
            )
        return None, returned

    @property
    def kind(self) -> Kind:
        """The kind of its prediction."""
        loss = self._predicted_loss()
        return "clicks" if loss is None else loss.kind

    def predict(self, batch: Any) -> torch.Tensor:
        """Logits float32 [B], without a loss."""
        return self.prediction(self.output(batch)[1])

    def prediction(self, output: Any) -> torch.Tensor:
        """The output's logits for the quality figures, float32 [B] and detached.

        Raises ``UserError``, saying what to return, if it is unclear which tensor they are.
        """
        found = self._predicted(output).detach()
        loss = self._predicted_loss()
        found = vector(found if loss is None or loss.logits is None else loss.logits(found))
        if found.dim() != 1:
            raise UserError(f"the model's prediction is {list(found.shape)}, not [B] or [B, 1]; {_REMEDY}")
        return found.float()

    def _predicted_loss(self) -> Loss | None:
        """The loss of the prediction; None if there are several and it is none of theirs."""
        if isinstance(self.loss, Loss):
            return self.loss
        alone = next(iter(self.loss)) if len(self.loss) == 1 else None
        return self.loss.get(self.key or alone or "")

    def labels_of(self, batch: Any) -> torch.Tensor:
        """The prediction's labels, float32 [B]."""
        name = self.labels
        if isinstance(self.loss, Mapping):
            name = f"{name}.{self.key or next(iter(self.loss))}"
        return vector(self._labels(batch, name)).float()

    def _labels(self, batch: Any, path: str) -> torch.Tensor:
        found, at = batch, "the batch"
        for name in path.split("."):
            part = _part(found, name)
            if part is _ABSENT:
                raise UserError(
                    f"model.labels={path}: {at} ({type(found).__name__}) has no '{name}'; "
                    f"{nearest_or_all(name, _names(found))}"
                )
            found, at = part, f"{at}'s {name}"
        if not isinstance(found, torch.Tensor):
            raise UserError(f"model.labels={path}: {at} is a {type(found).__name__}, not a tensor")
        return found

    def _predicted(self, output: Any) -> torch.Tensor:
        """The tensor in ``output`` that is the prediction."""
        found = output if self.key is None else _keyed(output, self.key)
        if isinstance(found, Mapping):
            found = next(iter(found.values())) if len(found) == 1 else None
        elif self.key is None and isinstance(found, list | tuple):
            if len(found) == 3 and _is_scalar(found[0]):  # TorchRec's DLRMTrain: (loss, logits, labels)
                found = found[1]
            else:
                found = found[0] if len(found) == 1 else None
        if isinstance(found, torch.Tensor):
            return found
        kind = f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            kind = f"a mapping of {', '.join(map(str, output))}"
        elif isinstance(output, list | tuple):
            kind = f"{len(output)} values"
        raise UserError(f"the model returns {kind}, of which it is not plain what it predicts; {_REMEDY}")


_REMEDY = (
    "return a tensor [B] or [B, 1], (loss, such a tensor), or say which part it is: model.prediction=KEY"
)


def _is_empty(batch: Any) -> bool:
    """Whether the batch is known to have no samples."""
    try:
        return batch_size(batch) == 0
    except UserError:
        return False


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _named_parameters(module: nn.Module) -> dict[str, Parameter]:
    """The parameters of ``forward`` without ``*args`` and ``**kwargs``; for a wrapper, those of the module
    inside."""
    while True:
        kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        found = {name: p for name, p in signature(module.forward).parameters.items() if p.kind not in kinds}
        inner = next((getattr(module, name) for name in _WRAPPERS if hasattr(module, name)), None)
        if found or not isinstance(inner, nn.Module):
            return found
        module = inner


_ABSENT = object()


def _part(value: Any, name: str) -> Any:
    """The entry or attribute of that name; ``_ABSENT`` if there is none, or a method."""
    if isinstance(value, Mapping):
        return value.get(name, _ABSENT)
    found = getattr(value, name, _ABSENT)
    return _ABSENT if callable(found) else found


def _names(value: Any) -> list[str]:
    """The names of the parts of ``value``."""
    if isinstance(value, Mapping):
        return [*map(str, value)]
    return [n for n in dir(value) if not n.startswith("_") and _part(value, n) is not _ABSENT]


def _keyed(output: Any, key: str) -> Any:
    if isinstance(output, list | tuple) and key.isdecimal() and int(key) < len(output):
        return output[int(key)]
    found = _part(output, key)
    if found is not _ABSENT:
        return found
    names = [*map(str, range(len(output)))] if isinstance(output, list | tuple) else _names(output)
    raise UserError(
        f"model.prediction={shown(key)}: the model's output has no such part; {nearest_or_all(key, names)}"
    )
