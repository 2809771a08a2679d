"""The whole recipe, typed and checked in one place before anything starts; later code uses these values.

The ``name`` of a section (data, model, task) selects the class for its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from annotated_types import Interval
from omegaconf import DictConfig

from recpipe.common.validation import FilePath, Text, chosen, fitted, mapping, no_value, typed, typed_part
from recpipe.config.compose import active_plugins, plain_values
from recpipe.config.task import (
    CompareConfig,
    InstalledTask,
    MissesConfig,
    PlanConfig,
    ProfileConfig,
    TaskConfig,
)
from recpipe.data.config import DataConfig, RecordsConfig, parse_config
from recpipe.distributed.launch import Topology
from recpipe.errors import UserError
from recpipe.model.config import MetricsConfig, ModelConfig, UserModel, parse_model
from recpipe.model.loss import is_one, named_loss
from recpipe.plugin.offers import is_offered, offered
from recpipe.tables.config import TierConfig
from recpipe.training.config import PRECISIONS, TrainerConfig
from recpipe.training.optim import OptimConfig

T = TypeVar("T")
TASKS: dict[str, type[TaskConfig]] = {
    "train": TaskConfig,
    "profile": ProfileConfig,
    "compare": TaskConfig,
    "plan": PlanConfig,
    "misses": MissesConfig,
}
"""recpipe's own tasks by name."""
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]
"""A seed that NumPy, torch and Python all accept."""


@dataclass(frozen=True)
class Compose:
    """``compose``: which plugin fills a slot that two of them want; None: no choice."""

    prefer: dict[str, Text | None]


@dataclass(frozen=True)
class Recipe:
    """A composed config as typed values. Keys outside of the sections are the user's own, for
    interpolations."""

    data: DataConfig
    model: ModelConfig | UserModel
    tiers: TierConfig
    optim: OptimConfig
    trainer: TrainerConfig
    metrics: MetricsConfig
    topology: Topology
    task: TaskConfig
    compare: CompareConfig | None
    """Set only for task=compare."""
    compose: Compose
    seed: int
    resume: str | None
    overwrite: bool
    """Whether results of another run, in places that the recipe names, are replaced."""
    plugins: Mapping[str, Mapping[str, Any]]
    """Knobs by plugin, in the order of the command line; each plugin's knobs are checked when it is
    loaded."""
    values: dict[str, Any]
    """The whole recipe in plain values with resolved interpolations, for the report."""

    @classmethod
    def of(cls, config: DictConfig) -> Recipe:
        """Type and check ``config``, a result of ``compose``; ``UserError`` names the first wrong key."""
        values = plain_values(config)
        section = values.get
        task = parse_task(_present(values, "task"))
        if isinstance(task, ProfileConfig) and section("resume"):
            raise UserError(
                f"task=profile starts anew and cannot go on from resume={section('resume')}; leave resume out"
            )
        compares = task.name == "compare"
        trainer = typed(TrainerConfig, _present(values, "trainer"), "trainer").effective()
        model = with_precision(parse_model(_present(values, "model")), trainer.precision)
        return cls(
            data=with_label_kind(parse_config(_present(values, "data")), model),
            model=model,
            tiers=typed(TierConfig, _present(values, "tiers"), "tiers"),
            optim=replace(typed(OptimConfig, _present(values, "optim"), "optim"), average=trainer.average),
            trainer=trainer,
            metrics=typed(MetricsConfig, section("metrics", {}), "metrics"),
            topology=typed(Topology, section("topology", {}), "topology"),
            task=task,
            compare=typed(CompareConfig, _present(values, "compare"), "compare") if compares else None,
            compose=typed(Compose, section("compose", {"prefer": {}}), "compose"),
            seed=fitted(Seed, _present(values, "seed"), "seed"),
            resume=fitted(FilePath | None, section("resume"), "resume"),
            overwrite=fitted(bool, section("overwrite", False), "overwrite"),
            plugins=active_plugins(config),
            values=values,
        )

    def section(self, kind: type[T], name: str) -> T:
        """The section ``name``, typed for a package's task that has it; ``UserError`` names the first wrong
        key."""
        return typed(kind, _present(self.values, name), name)


def with_precision(model: ModelConfig | UserModel, precision: str | None) -> ModelConfig | UserModel:
    """``model`` with the precision that ``trainer.precision`` names."""
    if precision is None:
        return model
    named = PRECISIONS[precision]
    if model.precision not in ("float32", named):
        raise UserError(
            f"trainer.precision={precision} and model.precision={model.precision} say different things: "
            "leave one of them out"
        )
    return replace(model, precision=named)


def with_label_kind(data: DataConfig, model: ModelConfig | UserModel) -> DataConfig:
    """``data`` with the kind of labels that the model's loss takes, unless the recipe sets it."""
    if not isinstance(data, RecordsConfig):
        return data
    stated = data.label_kind
    if isinstance(model.loss, Mapping) and not is_one(model.loss):
        if isinstance(stated, str):
            return data
        of_losses = {name: _kind(loss) for name, loss in model.loss.items()}
        found = {name: kind for name, kind in of_losses.items() if kind is not None}
        return replace(data, label_kind={**found, **(stated or {})})
    return replace(data, label_kind=stated or _kind(model.loss))


def _kind(loss: Any) -> str | None:
    """The kind of labels that a loss takes; None if it is not known."""
    named = named_loss(loss)
    return None if named is None else named.labels


def parse_task(values: object) -> TaskConfig:
    """The typed ``task`` section; a task of an installed package has further keys of its own."""
    section = mapping(values, "task")
    if section.get("name") in [*TASKS] or not is_offered("task", section.get("name")):
        return chosen(TASKS, section, "task", also=[name for name in offered("task") if name not in TASKS])
    keys, settings = typed_part(TaskConfig, section, "task")
    return InstalledTask(**vars(keys), settings=settings)


def _present(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise no_value(key)
    return values[key]
