"""Calls any model with a batch and gets a loss and an output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import Parameter, signature
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from recpipe.data.parts import batch_size
from recpipe.data.schema import LabelColumn
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.model.config import ModelConfig, UserModel
from recpipe.model.labels import LABELS, Labels
from recpipe.model.loss import parse_loss
from recpipe.model.losses.base import Loss, vector
from recpipe.model.losses.tasks import LOG_VARIANCES, UNCERTAINTY, Esmm, Uncertainty
from recpipe.model.outputs import (
    ABSENT,
    REMEDY,
    described,
    is_scalar,
    is_tensor,
    keyed,
    names_of,
    part_of,
    sole,
)
from recpipe.model.scores import Kind
from recpipe.plugin.batch import Batch

FEW = 16
"""In so few samples it may be by chance that there is no label 0."""
SCORE = "score"
"""The name of a model's only output."""
_WRAPPERS = ("module", "_orig_mod")
"""Attributes in which DistributedModelParallel, DistributedDataParallel and torch.compile keep the module."""


class Scored(NamedTuple):
    """Predictions of one label for B samples."""

    prediction: torch.Tensor
    """float32 [B]: logits of clicks."""
    labels: torch.Tensor
    """float32 [B]."""
    weights: torch.Tensor | None
    """float32 [B]; None: all samples count alike."""

    def side_by_side(self) -> torch.Tensor:
        """All three in host memory, float32 [B, 3]; weights of 1 where there are none."""
        weights = torch.ones_like(self.labels) if self.weights is None else self.weights
        return torch.stack([self.prediction, self.labels, weights], dim=1).float().cpu()


class Judgement(NamedTuple):
    """What a batch's evaluation gives."""

    losses: torch.Tensor
    """Of each task the sum of weight * loss over the samples, and that of the weights, float64 [T, 2] in host
    memory; [1, 2] of a module that gives its own loss."""
    tasks: dict[str, Scored | None]
    """By name; None of one whose predictions cannot be compared with labels."""


class Called:
    """A module as training calls it: ``called(batch)`` returns the 0-dim loss and the module's output.

    If ``forward`` takes one argument that is not an attribute of the batch, it gets the batch itself;
    otherwise it gets the batch's attributes by name. It returns ``(loss, output)``, as for TorchRec's train
    pipelines, or an output alone, from which ``loss`` computes the loss for the batch's ``labels``.

    With several labels the output is a mapping of their names, or float32 [B, L] with a column for each.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | Esmm | Mapping[str, Loss],
        labels: str = LABELS,
        prediction: str | None = None,
        low_precision: bool = False,
        columns: Sequence[str] = (),
        task_weights: Mapping[str, float] | Literal["uncertainty"] | None = None,
        label_weights: str | None = None,
    ) -> None:
        self.module = module
        self.joint = loss if isinstance(loss, Esmm) else None
        """What makes several outputs of the module's; None: they are the module's."""
        self.loss: Loss | Mapping[str, Loss] = loss.losses if isinstance(loss, Esmm) else loss
        self.labels = Labels(labels, columns, label_weights)
        """Where a batch has the labels and their weights."""
        self.key = prediction
        """Key, attribute or position of the prediction in the output; None: recpipe finds it."""
        self.low_precision = low_precision
        """Whether matrix products are computed in bfloat16."""
        self.uncertainty: Uncertainty | None = None
        """Weights of the losses in their sum, if they are learnt."""
        self.task_weights: Mapping[str, float] = {}
        """What the loss of each label is multiplied by in their sum; 1 of those that are not named."""
        if task_weights == UNCERTAINTY:
            self.uncertainty = Uncertainty(self._summed_losses(), _device_of(module))
        elif task_weights:
            self.task_weights = task_weights
        self.gives_loss = False
        """Whether the module, when it was last called, gave a loss of its own, and ``loss`` had no part."""
        self._said = prediction is not None or (isinstance(loss, Loss) and labels != LABELS)
        """Whether the recipe says what the prediction is."""
        self._parameters = {name: p.default is p.empty for name, p in _named_parameters(module).items()}
        """Of each parameter of ``forward``, whether it must be given."""
        self.outputs: Mapping[str, Callable[[Any], torch.Tensor]] = {}
        """What ``giving`` has named; none: what is scored are the predictions that the loss judges."""

    @classmethod
    def of(
        cls, module: nn.Module, config: ModelConfig | UserModel, labels: Sequence[LabelColumn] = ()
    ) -> Called:
        """Make ``module`` callable as the recipe says, for ``labels`` of the data; ``UserError`` for an
        unknown loss or label."""
        low, names = config.precision == "bfloat16", [label.name for label in labels]
        path = LABELS if isinstance(config, ModelConfig) else config.labels
        loss = parse_loss(config.loss, labels if path == LABELS else ())
        known = [*loss.losses] if isinstance(loss, Esmm) else names
        for name in config.task_weights if isinstance(config.task_weights, Mapping) else ():
            if name not in known:
                raise UserError(
                    f"model.task_weights.{shown(name)}: no such label; {nearest_or_all(name, known)}"
                )
        if isinstance(config, ModelConfig):
            return cls(module, loss, path, None, low, names, config.task_weights)
        more = config.task_weights, config.label_weights
        return cls(module, loss, path, config.prediction, low, names, *more)

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """The loss, a mean over the batch's samples (0 without samples), and the module's output.

        Raises ``UserError`` if batch, module, output and labels do not fit together.
        """
        own, output = self.output(batch)
        if own is not None:
            return (torch.nan_to_num(own) if _is_empty(batch) else own), output
        if isinstance(self.loss, Loss):
            labels = self.labels.at(batch, self.labels.path)
            weights = self.labels.weights(batch, self.labels.path)
            return self.loss(self._predicted(output), labels, weights, batch), output
        return torch.stack([*self.losses(output, batch).values()]).sum(), output

    def judge(self, batch: Any) -> Judgement:
        """The loss of each label, and its predictions, labels and weights for the figures of quality."""
        own, output = self.output(batch)
        return Judgement(self.summed(own, output, batch), self.scored(output, batch))

    def scored(self, output: Any, batch: Any) -> dict[str, Scored | None]:
        """``Judgement.tasks`` of what the module gave for ``batch``."""
        return {name: task._scored(output, batch) for name, task in self.judged.items()}

    def summed(self, own: torch.Tensor | None, output: Any, batch: Any) -> torch.Tensor:
        """``Judgement.losses`` of what ``output`` gives."""
        samples = batch_size(batch)
        if own is not None:
            return torch.stack([own.double().cpu() * samples, torch.tensor(samples)]).reshape(1, 2)
        losses, found = self.losses(output, batch), list[torch.Tensor]()
        for name, task in self.judged.items():
            if name not in losses:  # of an output that is judged and not learnt
                found.append(torch.zeros(2, dtype=torch.float64))
                continue
            weights = task.weights_of(batch)
            total = torch.tensor(samples, dtype=torch.float64)
            if weights is not None:  # of labels [B, L] without names, the mean over the columns
                total = weights.sum(dtype=torch.float64).cpu() / max(1, weights.numel() // max(1, samples))
            found.append(torch.stack([losses[name].double().cpu() * samples, total]))
        return torch.stack(found)

    def _scored(self, output: Any, batch: Any) -> Scored | None:
        """None if there is not one predicted value and label for each sample and the recipe does not say
        which they are."""
        try:
            prediction, labels = self.prediction(output), self.labels_of(batch)
        except UserError:
            if self._said:
                raise
            return None
        if prediction.shape != labels.shape:
            return None
        return Scored(prediction, labels, self.weights_of(batch))

    @property
    def tasks(self) -> dict[str, Called]:
        """This module for each of its outputs that can be scored, by name; a single one is called ``score``.

        These are the outputs that ``model.loss`` names, or the one that the recipe or recpipe has found.
        """
        if self.outputs:
            return {name: self._of(name) for name in self.outputs}
        return {SCORE: self} if isinstance(self.loss, Loss) else {name: self._of(name) for name in self.loss}

    def giving(self, outputs: Mapping[str, Callable[[Any], torch.Tensor]]) -> Called:
        """This module with other outputs to score, by name: each makes float32 [B] of what it returns."""
        made = copy.copy(self)
        made.key, made.outputs = None, outputs
        return made

    @property
    def losses_by_name(self) -> Mapping[str, Loss]:
        """The loss of each of ``tasks``."""
        return {SCORE: self.loss} if isinstance(self.loss, Loss) else self.loss

    @property
    def judged(self) -> dict[str, Called]:
        """The ``tasks`` in the order of the figures: what ``model.prediction`` names comes first."""
        tasks = self.tasks
        if isinstance(self.loss, Loss) or self.key is None:
            return tasks
        return {self.key: tasks.get(self.key, self), **tasks}

    def _of(self, task: str) -> Called:
        made = copy.copy(self)
        made.key, made._said = task, task == self.key
        return made

    def output(self, batch: Any) -> tuple[torch.Tensor | None, Any]:
        """What the module returns: its own loss, if it gives one, and its output. No labels are needed."""
        # Parts of the batch by the names of ``forward``'s parameters, unless it takes the batch itself.
        arguments: dict[str, Any] = {}
        absent, required = list[str](), 0
        for name, must in self._parameters.items():
            part = part_of(batch, name)
            if part is not ABSENT:
                arguments[name] = part
            elif must:
                absent.append(name)
            required += must
        first = next(iter(self._parameters), None)
        takes_batch = (absent or first not in arguments) and required <= 1 and len(absent) == required
        if absent and not takes_batch:
            raise UserError(
                f"{type(self.module).__name__}.forward takes '{absent[0]}', which the batch "
                f"({type(batch).__name__}) does not have; {nearest_or_all(absent[0], names_of(batch))}"
            )
        precision: AbstractContextManager[None] = nullcontext()
        if self.low_precision or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            device = _device_of(self.module)
            precision = torch.autocast(device.type, torch.bfloat16, enabled=self.low_precision)
        with precision:
            returned = self.module(batch) if takes_batch else self.module(**arguments)
        self.gives_loss = isinstance(returned, list | tuple) and len(returned) == 2 and is_scalar(returned[0])
        if self.gives_loss:
            needed = "weights" if isinstance(batch, Batch) else next(iter(self.labels.of_own), "")
            if not takes_batch and needed and needed not in arguments and _has_part(batch, needed):
                raise UserError(
                    f"{type(self.module).__name__} returns a loss of its own, which does not see the labels' "
                    f"weights: give its forward a parameter '{shown(needed)}', or let it return its output "
                    "alone"
                )
            return returned[0], returned[1]
        if is_scalar(returned):
            raise UserError(
                "the model returns a loss alone, and quality cannot be measured; return (loss, output)"
            )
        return None, returned if self.joint is None else self._joined(returned, self.joint)

    def _joined(self, output: Any, joint: Esmm) -> dict[str, torch.Tensor]:
        """The outputs that ``joint`` makes of the module's: those of its labels, or already of its names."""
        found = []
        for name in ("ctr", "cvr"):
            label = joint.labels[name]
            named = isinstance(output, Mapping) and name in output
            found.append(output[name] if named else self._of_label(output, label, self.losses_by_name[name]))
        return joint.outputs(*found)

    @property
    def whole_batch(self) -> str | None:
        """Why parts of a batch cannot be trained one by one, as far as the loss says so."""
        named = next((loss.name for loss in self.losses_by_name.values() if loss.whole_batch), None)
        if named is None and getattr(self.module, "whole_batch", False) is True:
            return f"{type(self.module).__name__}'s loss compares samples of a batch with each other"
        return f"model.loss={named} compares all samples of a batch with each other" if named else None

    @property
    def kind(self) -> Kind:
        """The kind of its prediction."""
        loss = self._predicted_loss()
        return "clicks" if loss is None else loss.kind

    def predict(self, batch: Any) -> torch.Tensor:
        """Logits float32 [B], or [B, T] of several tasks, without a loss."""
        output = self.output(batch)[1]
        if self.key is not None:
            return self.prediction(output)
        found = [task.prediction(output) for task in self.tasks.values()]
        return found[0] if len(found) == 1 else torch.stack(found, dim=1)

    def prediction(self, output: Any) -> torch.Tensor:
        """The output's logits for the quality figures, float32 [B] and detached.

        Raises ``UserError``, saying what to return, if it is unclear which tensor they are.
        """
        if self.key is not None and self.key in self.outputs:
            return self.outputs[self.key](output).detach().float()
        found, loss = self._predicted(output), self._predicted_loss()
        found = vector(found if loss is None else loss.logits(found)).detach()
        if found.dim() != 1:
            raise UserError(f"the model's prediction is {list(found.shape)}, not [B] or [B, 1]; {REMEDY}")
        return found.float()

    def _predicted_loss(self) -> Loss | None:
        """The loss of the prediction; None if there are several and it is none of theirs."""
        if isinstance(self.loss, Loss):
            return self.loss
        alone = next(iter(self.loss)) if len(self.loss) == 1 else None
        return self.loss.get(self.key or alone or "")

    def labels_of(self, batch: Any) -> torch.Tensor:
        """The prediction's labels, float32 [B]."""
        return vector(self.labels.at(batch, self._path())).float()

    def weights_of(self, batch: Any) -> torch.Tensor | None:
        """The weights of ``labels_of``, float32 [B]; None if they count alike. The rate of conversions after
        a click is judged on samples that were clicked."""
        found = self.labels.weights(batch, self._path())
        if self.joint is None:
            return None if found is None else vector(found)
        weights = torch.ones_like(self.labels_of(batch)) if found is None else vector(found)
        if self.key != "cvr":
            return weights
        path = f"{self.labels.path}.{self.joint.click}"
        clicked, known = self.labels.at(batch, path) > 0, self.labels.weights(batch, path)
        return weights * (clicked if known is None else clicked & (known > 0))

    def weighs(self, batch: Any) -> bool:
        """Whether the labels of ``batch`` may have weights."""
        return self.joint is not None or self.labels.weighs(batch)

    def _path(self) -> str:
        """Where the prediction's labels are."""
        if isinstance(self.loss, Loss):
            return self.labels.path
        return f"{self.labels.path}.{self.label_of(self.key or next(iter(self.loss)))}"

    def label_of(self, name: str) -> str:
        """The label of an output."""
        return name if self.joint is None else self.joint.labels.get(name, name)

    def losses(self, output: Any, batch: Any) -> dict[str, torch.Tensor]:
        """The loss of each task, as it is in their sum."""
        if isinstance(self.loss, Loss):
            weights = self.labels.weights(batch, self.labels.path)
            labels = self.labels.at(batch, self.labels.path)
            return {SCORE: self.loss(self._predicted(output), labels, weights, batch)}
        found: dict[str, torch.Tensor] = {}
        for name, loss in self._summed_losses().items():
            path = f"{self.labels.path}.{self.label_of(name)}"
            weights, part = self.labels.weights(batch, path), self._of_label(output, name, loss)
            own = loss(part, self.labels.at(batch, path), weights, batch)
            if self.uncertainty is not None:
                some = 0.0 if _is_empty(batch) else 1.0
                own = self.uncertainty(name, own, some if weights is None or not some else weights.mean())
            found[name] = own * self.task_weights[name] if name in self.task_weights else own
        return found

    def _summed_losses(self) -> Mapping[str, Loss]:
        """The losses of several labels that are added up; ``UserError`` if there is one label."""
        if isinstance(self.loss, Loss):
            raise UserError(
                f"model.task_weights={UNCERTAINTY}: there is one loss, {self.loss.name}; weights are of the "
                "losses of several labels"
            )
        return {name: loss for name, loss in self.loss.items() if self.joint is None or name != "cvr"}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What the loss itself learns, by name in a checkpoint; these are no part of the module."""
        return {} if self.uncertainty is None else {LOG_VARIANCES: self.uncertainty.log_variances}

    def check(self, batch: Any) -> None:
        """``UserError`` if a loss needs samples of label 0 and ``batch``, the first one, has none."""
        for name, loss in self.losses_by_name.items():
            if not loss.samples_negatives:
                continue
            labels = self.labels.at(
                batch, self.labels.path if name == SCORE else f"{self.labels.path}.{name}"
            )
            if len(labels) >= FEW and bool((labels > 0).all()):
                raise UserError(
                    f"model.loss={loss.name}: no sample of the first batch has label 0, so that there are no "
                    "negatives; set data.negatives='{feature: ITEM, ratio: 4}'"
                )

    def objective(self, batch: Any) -> dict[str, dict[str, Any]]:
        """By each output how it is learnt from batches such as ``batch``, for the report: the loss with its
        arguments, the kind of its figures, and its weight in the sum as it is now; None of one that is judged
        and not learnt."""
        learnt = {SCORE} if isinstance(self.loss, Loss) else {*self._summed_losses()}
        weights = self.task_weights if self.uncertainty is None else self.uncertainty.weights
        return {
            name: {
                "loss": "the model's own" if self.gives_loss else loss.name,
                "arguments": {} if self.gives_loss else loss.arguments(batch),
                "kind": loss.kind,
                "weight": weights.get(name, 1.0) if name in learnt else None,
            }
            for name, loss in self.losses_by_name.items()
        }

    def _of_label(self, output: Any, name: str, loss: Loss) -> Any:
        """The part of the output for one of several labels."""
        column = self._column(output, name)
        if column is not None:
            return column
        if not isinstance(output, Mapping):
            names = ", ".join(self.loss) if isinstance(self.loss, Mapping) else name
            shape = f" {list(output.shape)}" if isinstance(output, torch.Tensor) else ""
            columns = (
                f", or [B, {len(self.labels.columns)}], a column for each" if self.labels.columns else ""
            )
            raise UserError(
                f"there is a loss for each of {names}, so the model must return a "
                f"mapping of these names{columns}, not a {type(output).__name__}{shape}"
            )
        if name not in output:
            raise UserError(
                f"model.loss.{name}: the model returns no '{name}'; {nearest_or_all(name, output)}"
            )
        if loss.needs and not loss.takes(output[name]):
            raise UserError(
                f"model.loss.{name}={loss.name}: the model's '{name}' is {described(output[name])}; "
                f"{loss.needs}"
            )
        return output[name]

    def _column(self, output: Any, name: str) -> torch.Tensor | None:
        """The column of a label in an output [B, L]; None if it is none."""
        found = sole(output)
        if (
            isinstance(found, torch.Tensor)
            and found.dim() == 2
            and found.shape[1] == len(self.labels.columns)
        ):
            return found[:, self.labels.columns.index(name)] if name in self.labels.columns else None
        return None

    def _predicted(self, output: Any) -> Any:
        """The part of ``output`` that is the prediction: a tensor, or what else its loss takes."""
        loss = self._predicted_loss()
        takes = is_tensor if loss is None else loss.takes
        if self.key is None:
            found = output if takes(output) else sole(output)
        elif (found := self._column(output, self.key)) is None:
            found = keyed(output, self.key)
            if isinstance(found, Mapping) and not takes(found):
                found = sole(found)
        if takes(found):
            return found
        if loss is not None and loss.needs:
            raise UserError(f"model.loss={loss.name}: the model returns {described(output)}; {loss.needs}")
        raise UserError(
            f"the model returns {described(output)}, of which it is not plain what it predicts; {REMEDY}"
        )


def _device_of(module: nn.Module) -> torch.device:
    """That of the parameters outside tables to come."""
    return next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))


def _has_part(batch: Any, name: str) -> bool:
    """Whether it is there, and not None."""
    found = part_of(batch, name)
    return found is not ABSENT and found is not None


def _is_empty(batch: Any) -> bool:
    """Whether the batch is known to have no samples."""
    try:
        return batch_size(batch) == 0
    except UserError:
        return False


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
