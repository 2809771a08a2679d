"""The keys of ``hydra/launcher=torchrun``, by which a recipe composes; the launcher is among the tasks."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

NAME = "torchrun"


@dataclass
class TorchrunConf:
    """``hydra.launcher``: what each job's torchrun is told, and what a failed job means for the sweep."""

    _target_: str = "hydra_plugins.recpipe.TorchrunLauncher"
    nproc_per_node: int = 1
    max_restarts: int = 0
    stop_on_failure: bool = False
    """true: jobs after a failed one are not started."""


def register() -> None:
    """Let recipes choose it; calling it again changes nothing."""
    ConfigStore.instance().store(group="hydra/launcher", name=NAME, node=TorchrunConf, provider="recpipe")
