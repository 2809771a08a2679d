"""Composes recipes: finds the yaml, composes it, and explains each way of failing in one line."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from hydra.version import VersionBase, _get_version
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from recpipe.common.validation import nearest_key, no_value
from recpipe.common.words import CUSTOM, for_hydra, named, opened
from recpipe.config import launcher
from recpipe.errors import LONGEST, UserError, did_you_mean, shown
from recpipe.plugin.conf import TARGET, PluginSearchPath, PluginSource, package_confs
from recpipe.plugin.load import installed
from recpipe.plugin.offers import (
    GROUPS,
    PLUGIN,
    WORDS,
    blocked_words,
    entry,
    is_offered,
    offered,
    with_modules,
    without_blocks,
)

CONFIG_NAME = "train"
HYDRA = "1.3"
"""The ``version_base`` of recpipe's yaml."""
DEEPEST = 20
"""Most levels of nesting in an override's value; OmegaConf recurses over them."""
LONGEST_LINE = 1000
"""Most characters of a message of Hydra, which echoes whole values."""
_composing = RLock()
_KEY = re.compile(r"[+~]*\w[\w./$@:-]*", re.ASCII)
_PAIRS = {"]": "[", "}": "{", ")": "("}
_QUOTED = """text that is no plain name is quoted: 'data.dense=["price (EUR)"]'"""
"""The usual remedy; the outer quotes are for the shell."""


def conf_dir() -> Path:
    """The framework's yaml: ``recpipe/conf`` in a wheel, ``conf`` beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise UserError(
        f"no conf/{CONFIG_NAME}.yaml beside {package}: recpipe is not installed whole. Reinstall it"
    )


class FrameworkPath(SearchPathPlugin):
    """Keeps recpipe's own yaml on the search path if ``--config-path`` replaces it by a user's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        own = f"file://{conf_dir()}"
        if all(element.path not in (own, str(conf_dir())) for element in search_path.get_path()):
            search_path.append("recpipe", own)


def register() -> None:
    """Make Hydra find packages' yaml and the torchrun launcher's keys; calling it again changes nothing."""
    Plugins.instance().register(PluginSource)
    Plugins.instance().register(FrameworkPath)
    Plugins.instance().register(PluginSearchPath)
    launcher.register()


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the recipe that ``python -m recpipe *overrides`` would run; ``recpipe.run.run`` carries it out.

    Hydra's state in this process (``GlobalHydra``, ``HydraConfig``) is neither used nor changed, so that a
    program that runs under Hydra itself may call it. Raises a one-line ``UserError`` with the override and
    the nearest right one.
    """
    register()
    overrides = without_blocks(overrides)
    check_overrides(overrides)
    overrides = hydra_words(overrides)
    with readable_errors(overrides):
        recipe = _composed(overrides)
        check(recipe)
    return recipe


def hydra_words(words: Sequence[str]) -> list[str]:
    """Change ``words`` for Hydra so that a user's own model may have any keys (``recpipe.common.words``).

    So may an installed package's data source; its keys are checked later against their types.
    """
    words = with_modules(words)
    models = {file.stem for file in (conf_dir() / "model").glob("*.yaml")} - {CUSTOM}
    if any(is_offered("data", source) for source in named(words, "data")):
        words = opened(words, "data")
    return for_hydra(words, models, lambda: offered("model"))


def _composed(overrides: Sequence[str]) -> DictConfig:
    """Like ``hydra.compose``, without the singleton that ``hydra.initialize`` makes.

    Hydra meanwhile behaves as recpipe's yaml expects; a surrounding program may have chosen an older version.
    What ``@hydra.main`` has stored about that program, such as its name, is put aside.
    """
    setup_globals()  # resolvers, such as ${now:}
    base, job = VersionBase.instance(), JobRuntime.instance()
    with _composing:
        before = base.version_base, job.conf
        base.version_base, job.conf = _get_version(HYDRA), OmegaConf.create({"name": "recpipe"})
        try:
            loader = ConfigLoaderImpl(create_config_search_path(str(conf_dir())))
            recipe = loader.load_configuration(CONFIG_NAME, list(overrides), RunMode.RUN, from_shell=False)
        finally:
            base.version_base, job.conf = before
    with open_dict(recipe):
        del recipe["hydra"]
    return recipe


def check_overrides(words: Sequence[str]) -> None:
    """Refuse words for which Hydra would print a traceback: a group's option that is not a name, very deep
    nesting, very long numbers. Words that are not overrides (``-m``, ``--cfg job``) are not checked."""
    for word in words:
        if word.startswith("-") or not ("=" in word or word.startswith("~")):
            continue
        with readable_errors(words):
            try:
                (override,) = OverridesParser.create().parse_overrides([word])
            except (RecursionError, ValueError) as fault:
                raise UserError(f"cannot read the override '{shown(word)}': {shown(fault, 100)}") from fault
        if not override.key_or_group:
            raise UserError(unreadable(word, ""))
        if _depth(override.value()) > DEEPEST:
            raise UserError(f"'{shown(word)}' nests more than {DEEPEST} levels deep, which no recipe does")
        value = override.value()
        options = value if isinstance(value, list) else [value]
        if override.is_sweep_override() or all(o is None or isinstance(o, str) for o in options):
            continue
        if "." in override.key_or_group:  # a key in the recipe, not a group
            continue
        known = choices().get(override.key_or_group)
        if known is not None:
            raise UserError(
                f"{shown(word)}: must name an option of {override.key_or_group}; "
                f"there are {', '.join(sorted(known))}"
            )


def _depth(value: object) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)


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
        f"no yaml for plugin '{unknown}', so no plugin would be active.{did_you_mean(unknown, known)} "
        f"Installed: {', '.join(known) or 'none'}"
    )


def active_plugins(recipe: DictConfig) -> dict[str, dict[str, Any]]:
    """``plugins:`` in plain values: name -> knobs, in the order of the command line."""
    node = recipe.get("plugins")
    if node is not None and not isinstance(node, DictConfig):
        raise UserError(
            f"plugins={shown(node)}: must map plugin names to their knobs; switch one on with +plugin=NAME"
        )
    plain = OmegaConf.to_container(node or OmegaConf.create({}), resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    for name, knobs in plain.items():
        if not isinstance(knobs, dict | None):
            raise UserError(f"plugins.{shown(name)}={shown(knobs)}: must map the plugin's knobs to values")
    return {str(name): {str(k): v for k, v in (knobs or {}).items()} for name, knobs in plain.items()}


def plain_values(config: DictConfig) -> dict[str, Any]:
    """The recipe as dicts, lists and scalars, with text keys and resolved interpolations; no value may be
    missing."""
    with readable_errors(()):
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    named = _named(content)
    assert isinstance(named, dict)
    return named


def _named(node: Any) -> Any:
    """``node`` with keys as text, as in JSON; yaml's may be numbers."""
    if isinstance(node, dict):
        return {str(key): _named(value) for key, value in node.items()}
    return [_named(item) for item in node] if isinstance(node, list) else node


@contextmanager
def readable_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors into a ``UserError`` of one line."""
    try:
        yield
    except OverrideParseException as fault:
        raise UserError(unreadable(str(fault.override), str(fault))) from fault
    except MissingMandatoryValue as fault:
        raise no_value(fault.full_key or str(fault).splitlines()[0].rpartition(" ")[2]) from fault
    except YAMLError as fault:
        raise UserError(f"broken yaml: {_one_line(fault)}") from fault
    except (HydraException, OmegaConfBaseException) as fault:
        absent = re.search(r"Could not (?:find|load) '([^'/]+)/([^']+?)(?:\.yaml)?'", str(fault))
        raise UserError(_missing(*absent.groups()) if absent else _bad_key(fault, overrides)) from fault
    except OSError as fault:
        if fault.errno != errno.ENAMETOOLONG:
            raise
        longest = shown(max(overrides, key=len, default=fault.filename))
        raise UserError(f"'{longest}': too long for a file's name") from fault


def choices() -> dict[str, set[str]]:
    """The options of every config group, including plugins and Hydra's launchers: group -> names."""
    register()
    found: dict[str, set[str]] = {}
    for file in _files():
        found.setdefault(file.parent.name, set()).add(file.stem)
    if PLUGIN in found:
        found[PLUGIN] &= installed().keys()
    found["hydra/launcher"] = {
        name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher")
    }
    return dict(sorted(found.items()))


def _files(group: str = "*") -> list[Path]:
    """The yaml of a config group's options, or of all: recpipe's own and that of packages."""
    return [file for root in (conf_dir(), *package_confs()) for file in root.glob(f"{group}/*.yaml")]


def _missing(group: str, option: str) -> str:
    """The message for ``data=nope`` and ``+plugin=nope``, with the nearest option of the group."""
    if group in GROUPS and option in (available := offered(group)):
        entry(group, option, available)  # which refuses a name that two packages use
        return (
            f"{WORDS[group]} '{option}' is installed but brings no conf/{group}/{option}.yaml; "
            "ask its author for one"
        )
    if group == "hydra":
        group, _, option = f"{group}/{option}".rpartition("/")
    options = sorted(choices().get(group, ()))
    known = "Installed" if group == "plugin" else "There are"
    hint = f"{blocked_words(option)}.{did_you_mean(option, options)}"
    return f"no {group} '{option}'{hint} {known}: {', '.join(options) or 'none'}"


def _bad_key(fault: Exception, overrides: Sequence[str]) -> str:
    """The message for ``trainer.max_stepz=3``, with the nearest key of the recipe; otherwise Hydra's message
    in one line."""
    text = str(fault)
    if any(o.startswith("+plugins=") for o in overrides):
        return (
            "plugins are chosen by +plugin=NAME or '+plugin=[a,b]', without an s; a knob: plugins.NAME.KNOB"
        )
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
    if choosing := _choosing(key):
        return f"no '{key}' in this recipe: it goes with {' or '.join(choosing)}"
    return (
        f"no '{key}' in the recipe.{nearest_key(key, keys)} See the whole recipe: python -m recpipe --cfg job"
    )


def _choosing(key: str) -> list[str]:
    """The words that would choose a part of a recipe in which ``key`` is: ``data=parquet`` for
    ``data.path``."""
    first, _, rest = key.partition(".")
    known = choices()
    if first == "plugins":
        plugin = rest.partition(".")[0]
        words = [f"+{PLUGIN}={plugin}"] if plugin in known[PLUGIN] else []
    else:
        group = first if first in known else "task"
        words = [f"{group}={option}" for option in sorted(known[group] & _mentioning(key, group))]
    words = [word for word in words if key in _known_keys([word])]
    custom = f"model={CUSTOM}"
    own = [f"a class of your own, model.{TARGET}=package.Class"] if custom in words else []
    return own + [word for word in words if word != custom]


def _mentioning(key: str, group: str) -> set[str]:
    """The options of ``group`` that may have ``key``: their yaml has its last name in it, or takes in other
    yaml. To compose all of them takes seconds."""
    last = key.rpartition(".")[2]
    read = ((file.stem, file.read_text(encoding="utf-8", errors="replace")) for file in _files(group))
    return {option for option, text in read if last in text or "defaults" in text}


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """Every dotted key of the recipe, and the config groups; composed with ``overrides`` if that works."""
    groups = [folder.name for folder in conf_dir().iterdir() if folder.is_dir()]
    for tried in (list(overrides), []):
        try:
            recipe = _composed(tried)
        except (HydraException, OmegaConfBaseException):
            continue
        return [*groups, *_dotted(OmegaConf.to_container(recipe, resolve=False), "")]
    return groups


def _dotted(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _dotted(value, f"{prefix}{key}.")


def _one_line(fault: BaseException) -> str:
    """Hydra's message in one line, without its indented details."""
    text = str(fault)
    if text.startswith("Error merging override") and fault.__cause__ is not None:
        text += f": {fault.__cause__}"
    lines = [line.strip() for line in text.splitlines()]
    kept = " ".join(
        line
        for line in lines
        if line and not line.startswith(("full_key:", "object_type=", "reference_type="))
    )
    return shown(kept, LONGEST_LINE)


def unreadable(word: str, said: str) -> str:
    """The message about the override ``word``, for which the parser has ``said`` something."""
    key, _, value = word.partition("=")
    if not _KEY.fullmatch(key):
        why = f"'{shown(key)}' is no key. Write key=value"
    elif refused := re.search(r"while evaluating '(.*)': (?!Unknown function)(.*)", said):
        why = f"{shown(refused.group(1))}: {shown(refused.group(2), 100)}"
    elif unpaired := _unpaired(value):
        why = f"{unpaired}. Pair it; {_QUOTED}"
    else:
        why = f"'{shown(value)}' is no number, plain name, list or mapping. "
        if set("[]{}'\"\\") & set(value) or len(value) > LONGEST:  # it cannot be quoted as it is
            why += f"{_QUOTED[0].upper()}{_QUOTED[1:]}"
        else:
            why += f"If it is text, quote it: '{key}=\"{shown(value)}\"'"
    return f"cannot read the override '{shown(word)}': {why}"


def _unpaired(value: str) -> str:
    """The bracket or quote that has no other half, as the beginning of a sentence; empty if there is none."""
    opened: list[str] = []
    quote = ""
    for before, mark in zip(f" {value}", value, strict=False):
        if quote:
            quote = "" if mark == quote and before != "\\" else quote
        elif mark in "'\"":
            quote = mark
        elif mark in _PAIRS.values():
            opened.append(mark)
        elif mark in _PAIRS and (not opened or opened.pop() != _PAIRS[mark]):
            return f"its {mark} closes nothing"
    unclosed = quote or (opened[-1] if opened else "")
    return f"its {unclosed} is not closed" if unclosed else ""
