"""Whether another plugin that runs beside the suite's keeps its knobs and its code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from recpipe.config.compose import active_plugins
from recpipe.plugin.api import Plugin
from recpipe.plugin.load import instantiate
from recpipe.tasks.plugins import SAMPLE
from recpipe.testing.replaced import Replaced

_PLAIN = (bool, int, float, str, bytes, type(None))


class Others:
    """The plugin ``beside`` of a recipe, as it is alone: made before any other plugin is imported."""

    def __init__(self, composed: DictConfig, beside: str) -> None:
        self.name = beside
        if not beside:
            return
        alone = instantiate(beside, active_plugins(composed)[beside])
        self.cls = type(alone)
        self.code = Replaced({self.cls.__module__.partition(".")[0]})
        made = values(vars(alone))
        alone.contribute(SAMPLE)
        own = values(vars(alone))
        self.values = {name: value for name, value in made.items() if own.get(name) == value}

    def changed(self) -> Iterator[str]:
        """Attributes of the plugin's objects in this process that are not what its knobs say."""
        if not self.name:
            return
        for plugin in gc.get_objects():
            if isinstance(plugin, Plugin) and type(plugin) is self.cls:
                now = values(vars(plugin))
                for name, value in self.values.items():
                    if now.get(name) != value:
                        yield f"changes {name} of plugin '{self.name}' from {value} to {now.get(name)}"

    def left(self) -> Iterator[str]:
        """What is replaced of the plugin's code."""
        if self.name:
            yield from (f"replaces {name} of plugin '{self.name}'" for name in self.code.all())


def values(content: Any) -> Any:
    """``content`` without what is no plain value: numbers and texts, and mappings and sequences of these."""
    if isinstance(content, _PLAIN):
        return content
    if isinstance(content, dict):
        return {str(key): values(value) for key, value in content.items()}
    if isinstance(content, list | tuple | set | frozenset):
        found = [values(value) for value in content]
        return sorted(found, key=repr) if isinstance(content, set | frozenset) else found
    return type(content).__name__
