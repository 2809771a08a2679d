"""Recipes: where the yaml is, how it composes, and one clear line for each way it can fail to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from recpipe import launcher
from recpipe.errors import UserError
from recpipe.plugin.conf import GROUP, PluginSearchPath, PluginSource, plugin_conf
from recpipe.plugin.knobs import fits, spelled
from recpipe.plugin.load import installed

CONFIG_NAME = "train"
T = TypeVar("T")


def conf_dir() -> Path:
    """The framework's yaml: ``recpipe/conf`` in a wheel, ``conf`` beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise UserError(
        f"no conf/{CONFIG_NAME}.yaml beside {package}: recpipe is not installed whole. Reinstall it"
    )


def register() -> None:
    """Make Hydra find plugins' yaml and the torchrun launcher; calling it again changes nothing."""
    Plugins.instance().register(PluginSource)
    Plugins.instance().register(PluginSearchPath)
    launcher.register()


def compose(overrides: Sequence[str] = (), run_dir: Path | None = None) -> DictConfig:
    """The recipe that ``python -m recpipe *overrides`` would run.

    With ``run_dir``, ``recpipe.run.run`` can carry it out in this process and writes there.
    Raises ``UserError`` with one line that names the override and the nearest right one.
    """
    register()
    with readable_errors(overrides), hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        if run_dir is None:
            recipe = hydra.compose(CONFIG_NAME, overrides=list(overrides))
        else:
            recipe = hydra.compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=True)
            with open_dict(recipe):
                recipe.hydra.runtime.output_dir = str(run_dir)
                HydraConfig.instance().set_config(recipe)
                del recipe["hydra"]
        check(recipe)
    return recipe


def check(recipe: DictConfig) -> None:
    """Refuse a ``plugin`` key that Hydra took for a plain value: no plugin would be active."""
    if "plugin" not in recipe:
        return
    if OmegaConf.is_dict(recipe.plugin):
        raise UserError(
            f"the yaml that sets {', '.join(map(str, recipe.plugin))} under 'plugin' lacks its first line, "
            "'# @package plugins.NAME', so no plugin would be active. Ask the plugin's author to add it"
        )
    names = [str(n) for n in recipe.plugin] if OmegaConf.is_list(recipe.plugin) else [str(recipe.plugin)]
    known = list(installed())
    unknown = next((n for n in names if n not in known), names[0] if names else "")
    raise UserError(
        f"no yaml for plugin '{unknown}', so no plugin would be active.{_nearest(unknown, known)} "
        f"Installed: {', '.join(known) or 'none'}"
    )


def active_plugins(recipe: DictConfig) -> dict[str, dict[str, Any]]:
    """``plugins:`` as plain values: name -> knobs, in the order of the command line."""
    node = recipe.get("plugins")
    if node is not None and not isinstance(node, DictConfig):
        raise UserError(
            f"plugins={node}: must map plugin names to their knobs; switch one on with +plugin=NAME"
        )
    plain = OmegaConf.to_container(node or OmegaConf.create({}), resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(name): _knobs(str(name), knobs) for name, knobs in plain.items()}


def _knobs(name: str, knobs: Any) -> dict[str, Any]:
    if knobs is None:
        return {}
    if not isinstance(knobs, dict):
        raise UserError(f"plugins.{name}={knobs}: must map the plugin's knobs to values")
    return {str(k): v for k, v in knobs.items()}


def typed(cls: type[T], node: DictConfig, section: str) -> T:
    """The dataclass ``cls`` filled from the recipe's ``section``; interpolations are resolved.

    Raises ``UserError`` that names the key and the value for an unknown, missing or mistyped one.
    """
    values = knobs(node, section)
    hints = get_type_hints(cls)
    for key, value in values.items():
        name = f"{section}.{key}"
        if key not in hints:
            raise UserError(f"no '{name}' in the recipe.{_nearest(name, [f'{section}.{h}' for h in hints])}")
        if value != "???" and not fits(value, hints[key]):
            raise UserError(f"{name}={value}: must be {spelled(hints[key])}")
    required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}  # type: ignore[arg-type]
    absent = [key for key in hints if values.get(key) == "???" or (key in required and key not in values)]
    if absent:
        raise UserError(
            f"{section}.{absent[0]} has no value in this recipe: set it, {section}.{absent[0]}=VALUE"
        )
    return cls(**values)


def knobs(node: DictConfig, section: str) -> dict[str, Any]:
    """The recipe's ``section`` as plain values, interpolations resolved."""
    with readable_errors(()):
        content = OmegaConf.to_container(node, resolve=True)
    if not isinstance(content, dict):
        raise UserError(f"{section}={node}: must map keys to values, as conf/{section} does")
    return {str(key): value for key, value in content.items()}


@contextmanager
def readable_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors into a ``UserError`` of one line."""
    try:
        yield
    except OverrideParseException as fault:
        raise UserError(f"cannot read the override '{fault.override}': {_parse_fault(str(fault))}") from fault
    except MissingMandatoryValue as fault:
        key = str(fault).splitlines()[0].rpartition(" ")[2]
        raise UserError(f"{key} has no value in this recipe: set it, {key}=VALUE") from fault
    except YAMLError as fault:
        raise UserError(f"broken yaml: {_one_line(fault)}") from fault
    except (HydraException, OmegaConfBaseException) as fault:
        absent = re.search(r"Could not (?:find|load) '([^'/]+)/([^']+?)(?:\.yaml)?'", str(fault))
        raise UserError(_missing(*absent.groups()) if absent else _bad_key(fault, overrides)) from fault


def _parse_fault(text: str) -> str:
    """The parser's complaint without its grammar; what usually mends it."""
    lines = [line for line in text.splitlines() if not line.startswith(("Error parsing", "See http"))]
    why = (lines or [text])[0].partition(" expecting ")[0]
    return f"{why}. Write key=value, and quote values that hold commas, equal signs, brackets or spaces"


def choices() -> dict[str, set[str]]:
    """Options of every config group, the plugins' and Hydra's launchers among them: group -> names."""
    register()
    roots = [conf_dir(), *filter(None, map(plugin_conf, installed().values()))]
    found: dict[str, set[str]] = {}
    for file in (file for root in roots for file in root.glob("*/*.yaml")):
        found.setdefault(file.parent.name, set()).add(file.stem)
    if GROUP in found:
        found[GROUP] &= installed().keys()
    found["hydra/launcher"] = {
        name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")
    }
    return dict(sorted(found.items()))


def _missing(group: str, option: str) -> str:
    """``data=nope`` and ``+plugin=nope``: the nearest option of the group."""
    if group == "plugin" and option in installed():
        return (
            f"plugin '{option}' is installed but brings no conf/plugin/{option}.yaml; ask its author for one"
        )
    if group == "hydra":
        group, _, option = f"{group}/{option}".rpartition("/")
    options = sorted(choices().get(group, ()))
    known = "Installed" if group == "plugin" else "There are"
    return f"no {group} '{option}'.{_nearest(option, options)} {known}: {', '.join(options) or 'none'}"


def _bad_key(fault: Exception, overrides: Sequence[str]) -> str:
    """``trainer.max_stepz=3``: the nearest key of the recipe; anything else: what Hydra says, in one line."""
    text = str(fault)
    found = re.search(
        r"Could not (override|delete from config)\W+'?([^'\s]+?)'?( does not exist)?(\.\s|\s|$)", text
    )
    if not found:
        return _one_line(fault)
    key = found.group(2).partition("@")[0]
    if key == "plugin":
        return "plugins are added to a recipe: write +plugin=NAME or '+plugin=[a,b]', with the plus sign"
    keys = _known_keys([o for o in overrides if key not in o and not o.startswith("-")])
    if key in keys and fault.__cause__ is not None:
        return f"{key}: {_one_line(fault.__cause__)}. See the recipe: python -m recpipe --cfg job"
    return f"no '{key}' in the recipe.{_nearest(key, keys)} See the whole recipe: python -m recpipe --cfg job"


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """Every dotted key of the recipe, and the config groups; with ``overrides`` where they compose."""
    groups = [folder.name for folder in conf_dir().iterdir() if folder.is_dir()]
    for tried in (list(overrides), []):
        try:
            with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
                recipe = hydra.compose(CONFIG_NAME, overrides=tried)
        except (HydraException, OmegaConfBaseException):
            continue
        return [*groups, *_dotted(OmegaConf.to_container(recipe, resolve=False), "")]
    return groups


def _dotted(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _dotted(value, f"{prefix}{key}.")


def _nearest(word: str, words: Sequence[str]) -> str:
    """Nearest whole key, else a key whose last part is nearest to the last part of ``word``."""
    near = difflib.get_close_matches(word, words, n=1)
    if not near:
        last = word.rpartition(".")[2]
        near = [w for w in words if w.rpartition(".")[2] == last][:1]
    return f" Did you mean '{near[0]}'?" if near else ""


def _one_line(fault: BaseException) -> str:
    """What Hydra says, without its indented detail, as one line."""
    text = str(fault)
    if text.startswith("Error merging override") and fault.__cause__ is not None:
        text += f": {fault.__cause__}"
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(
        line
        for line in lines
        if line and not line.startswith(("full_key:", "object_type=", "reference_type="))
    )
