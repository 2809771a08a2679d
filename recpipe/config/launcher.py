"""The keys of ``hydra/launcher=torchrun``, which composing needs; the launcher itself is among the tasks."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType

NAME = "torchrun"


@dataclass
class TorchrunConf:
    """``hydra.launcher``: the settings of each job's torchrun, and the effect of a failed job on the
    sweep."""

    _target_: str = "hydra_plugins.recpipe.TorchrunLauncher"
    nproc_per_node: int = 1
    max_restarts: int = 0
    stop_on_failure: bool = False
    """true: jobs after a failed one are not started."""


def register() -> None:
    """Make the launcher available to recipes; calling it again changes nothing."""
    store = ConfigStore.instance()
    if (
        store.get_type(f"hydra/launcher/{NAME}.yaml") is ObjectType.NOT_FOUND
    ):  # Hydra 1.4 warns of a second one
        store.store(group="hydra/launcher", name=NAME, node=TorchrunConf, provider="recpipe")
