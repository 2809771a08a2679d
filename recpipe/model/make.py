"""Makes the module of the recipe's model section: finds its class and the arguments that it takes."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.common.validation import fitted, no_value
from recpipe.common.words import CUSTOM, made_within
from recpipe.data.dataset import Dataset
from recpipe.data.schema import Schema
from recpipe.errors import UserError, did_you_mean, shown
from recpipe.model.call import Called
from recpipe.model.config import ModelConfig, ModelKeys, UserModel, table_init
from recpipe.model.dlrm import CPU, META, DlrmSizes, make_dlrm
from recpipe.plugin.conf import TARGET
from recpipe.plugin.offers import entry, imported, offered
from recpipe.private_api import module_name

LONGEST = 300
"""Characters of a fault's text that a message echoes."""
_OWN_KEYS = {f.name: f.default for f in fields(ModelKeys) if f.name != "embedding_dim"}
"""Keys that recpipe reads itself and does not pass to constructors, with their defaults."""
_COLLECTIONS = ("embedding_bag_collection", "embedding_collection")
_OF_DIMENSION = ("embedding_dim", *_COLLECTIONS)
"""Arguments that need ``model.embedding_dim``."""
_OF_TABLES = ("schema", *_COLLECTIONS)
"""Arguments that depend on the rows of the data's tables."""
_OF_DENSE = ("num_dense_features", "dense_in_features")
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def make_called(
    config: ModelConfig | UserModel,
    dataset: Dataset,
    device: torch.device,
    given: nn.Module | None = None,
) -> Called:
    """Make the model of the recipe, or take the one ``given`` by a caller in Python, ready to be called by
    training. Its parameters are on ``device``, except those on the meta device."""
    if given is not None:
        assert isinstance(config, UserModel), "whoever gives a model chooses model=custom"
        require_own_tables(config, ())
        _move(given, device)
        return Called.of(given, config, () if dataset.schema is None else dataset.schema.labels)
    schema = dataset.known_schema()
    if isinstance(config, UserModel):
        return Called.of(make_model(config, schema, device), config, schema.labels)
    for label in schema.labels:
        if label.kind == "classes":
            raise UserError(
                f"label {shown(label.name)} is of kind classes: model={config.name} has one output for each "
                f"label; classes need a model of your own, model.{TARGET}=package.Class, with one for each"
            )
    made = make_dlrm(DlrmSizes.of(config, schema), device, init=table_init(config))
    return Called.of(made, config, schema.labels)


def make_model(config: UserModel, schema: Schema, device: torch.device) -> nn.Module:
    """Make the module that ``config`` names. Its parameters are moved to ``device``, except those on the meta
    device.

    The class, or the function that makes a module, is called with the recipe's ``arguments``, and with those
    of its other parameters that recpipe knows by name (``known_arguments``). The caller seeds the random
    numbers. Raises a one-line ``UserError`` if the class cannot be imported or made.
    """
    maker = _find_maker(config)
    takes = _parameters(config, maker)
    return _made(config, maker, known_arguments(config, schema, device, takes), device)


def require_own_tables(config: UserModel, gets: Container[str]) -> None:
    """``UserError`` if the recipe says what the first values of tables are, and the model, whose constructor
    ``gets`` these arguments, makes its tables itself."""
    if table_init(config) is not None and not any(name in gets for name in _COLLECTIONS):
        key = "table_init_bound" if config.table_init_std is None else "table_init_std"
        raise UserError(
            f"model.{key}={getattr(config, key)}: {config.said} takes no tables of recpipe's, and makes "
            "its own: set the key to null, and give init_fn to the configs of its tables"
        )


class _NeedsData(Exception):
    """An argument is not known before the data are."""


def make_before_data(
    config: UserModel, dense: Sequence[str] | None, device: torch.device
) -> nn.Module | None:
    """The module that ``make_model`` makes, whatever the data's tables are; None if it depends on them.

    ``dense``: the names of the dense inputs; None: not known either.
    """

    def unknown() -> Any:
        raise _NeedsData

    waiting = (*_OF_TABLES, *_OF_DENSE) if dense is None else _OF_TABLES
    known = known_arguments(config, Schema(tuple(dense or ()), ()), device)
    try:
        return _made(config, _find_maker(config), known | dict.fromkeys(waiting, unknown), device)
    except _NeedsData:
        return None


def _made(
    config: UserModel,
    maker: Callable[..., Any],
    known: Mapping[str, Callable[[], Any]],
    device: torch.device,
) -> nn.Module:
    arguments = {key: made_within(value, f"model.{key}") for key, value in config.arguments.items()}
    if getattr(maker, "__module__", "").partition(".")[0] == __name__.partition(".")[0]:
        hints = get_type_hints(maker.__init__, include_extras=True)
        arguments = {
            key: fitted(hints[key], value, f"model.{key}") if key in hints else value
            for key, value in arguments.items()
        }
    arguments |= _complete(config, maker, known)
    try:
        made = maker(**arguments)
    except UserError:
        raise
    except Exception as fault:
        raise UserError(
            f"{config.said}: its constructor raised {described(fault, getattr(maker, '__module__', ''))}"
        ) from fault
    if not isinstance(made, nn.Module):
        raise UserError(f"{config.said} makes a {type(made).__name__}, not a torch.nn.Module")
    _move(made, device)
    return made


def _move(module: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers that are not on the meta device."""
    move: Callable[..., nn.Module] = module._apply
    move(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def known_arguments(
    config: UserModel, schema: Schema, device: torch.device, takes: Collection[str] = ()
) -> dict[str, Callable[[], Any]]:
    """Makers of the arguments that recpipe passes to a constructor that has parameters of these names
    (``docs/guide/models.md``). The collections have a table for each sparse feature, or for those that
    share one, on the meta device.

    ``takes``: the constructor's parameters. If both collections are among them, and the data have sequences
    with targets, the tables of these are in the ``EmbeddingCollection``, and all others in the
    ``EmbeddingBagCollection``, or None if there are none.
    """
    both = {*_COLLECTIONS} <= {*takes}
    apart = {schema.table_of(name) for name in schema.targets} if both else set()

    said, init = config.said, table_init(config)

    def dimension() -> int:
        if config.embedding_dim is None:
            raise no_value("model.embedding_dim")
        return config.embedding_dim

    def table(name: str) -> dict[str, Any]:
        own = schema.tables[name]
        return {
            "name": module_name(name),
            "embedding_dim": own[0].dim or dimension(),
            "num_embeddings": own[0].rows,
            "feature_names": [feature.name for feature in own],
            "init_fn": init,
        }

    def bags() -> EmbeddingBagCollection | None:
        configs = []
        for name, own in schema.tables.items():
            # The weights of ids say what a mean is, where they have some.
            how = "sum" if schema.weighted else own[0].pooling
            if name not in apart:
                configs.append(EmbeddingBagConfig(**table(name), pooling=PoolingType(how.upper())))
        if apart and not configs:
            return None
        return EmbeddingBagCollection(configs, is_weighted=schema.weighted, device=META)

    def rows() -> EmbeddingCollection:
        configs = [EmbeddingConfig(**table(name)) for name in schema.tables if not apart or name in apart]
        for config in configs:
            if config.embedding_dim != configs[0].embedding_dim:
                raise UserError(
                    f"tables '{configs[0].name}' and '{config.name}' have rows of {configs[0].embedding_dim} "
                    f"and {config.embedding_dim} values, and {said} looks up sequences in tables of "
                    "one dimension: state the same dim in data.features"
                )
        return EmbeddingCollection(configs, device=META)

    return {
        "schema": lambda: schema,
        "embedding_dim": dimension,
        "embedding_bag_collection": bags,
        "embedding_collection": rows,
        # The number of columns of ``Batch.dense_features``.
        "num_dense_features": lambda: max(1, len(schema.dense)),
        "dense_in_features": lambda: max(1, len(schema.dense)),
        # TorchRec's models draw their first values there, and a GPU draws others than a CPU.
        "dense_device": lambda: CPU,
        "device": lambda: device,
    }


def _find_maker(config: UserModel) -> Callable[..., Any]:
    """The class or function of the entry point, or the one that ``_target_`` names."""
    if config.target is not None:
        found = locate(config.target, f"model.{TARGET}")
    elif config.name == CUSTOM:
        raise UserError(f"model={CUSTOM}: say which class, model.{TARGET}=package.module.Class")
    else:
        found = imported("model", entry("model", config.name, offered("model")))
    a_module = not isinstance(found, type) or issubclass(found, nn.Module)
    if not callable(found) or isinstance(found, nn.Module) or not a_module:
        what = f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise UserError(
            f"{config.said} is {what}: name a class of torch.nn.Module, or a function that makes one"
        )
    maker: Callable[..., Any] = found
    return maker


def _parameters(config: UserModel, maker: Callable[..., Any]) -> Mapping[str, Parameter]:
    try:
        return signature(maker).parameters
    except (TypeError, ValueError) as fault:
        raise UserError(
            f"{config.said}: Python does not tell its arguments; name a class of your own"
        ) from fault


def _complete(
    config: UserModel, maker: Callable[..., Any], known: Mapping[str, Callable[[], Any]]
) -> dict[str, Any]:
    """The arguments that the recipe does not set; ``UserError`` for unknown or missing ones."""
    parameters = _parameters(config, maker)
    takes = {name: p for name, p in parameters.items() if p.kind in _BY_NAME}
    for name in _OWN_KEYS.keys() & takes.keys():
        named = name == "name" and config.target is None  # it has chosen an installed package's model
        set_ = getattr(config, name) != _OWN_KEYS[name] and not named
        if set_ or takes[name].default is Parameter.empty:  # the parameter would not get its value
            raise UserError(
                f"model.{name}: recpipe reads this key itself, and {config.said} has a parameter of that "
                "name, which does not get it. Name a function that makes the model instead: with another "
                f"name for the parameter (def make(its_{name}): return Model({name}=its_{name})), or "
                f"without it, so that model.{name} is recpipe's alone"
            )
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [key for key in config.arguments if key not in takes]
    if unknown:
        own = [name for name in takes if name not in known]
        hint = did_you_mean(unknown[0], [*own, *(f.name for f in fields(ModelKeys))])
        listed = hint or f" It takes {', '.join(own) or 'none from the recipe'}"
        raise UserError(f"model.{shown(unknown[0])}: {config.said} has no such argument.{listed}")
    added = {name: make for name, make in known.items() if name in takes and name not in config.arguments}
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty
        and (p.kind in _BY_NAME or p.kind is Parameter.POSITIONAL_ONLY)
        and name not in {*config.arguments, *added}
    ]
    if missing:
        sets = " ".join(f"model.{name}=VALUE" for name in missing)
        raise UserError(f"{config.said} needs {', '.join(missing)}, which has no value: set {sets}")
    if config.embedding_dim is None:  # a parameter that needs it keeps its own default
        for name in _OF_DIMENSION:
            if name in added and takes[name].default is not Parameter.empty:
                del added[name]
    require_own_tables(config, added)
    return {name: make() for name, make in added.items()}


def locate(path: str, key: str) -> Any:
    """Import what ``package.module.Class`` names; a one-line ``UserError``, naming ``key``, if that fails."""

    def import_one(name: str) -> ModuleType:
        try:
            return import_module(name)
        except ModuleNotFoundError as fault:
            if fault.name != name:
                raise UserError(f"{key}={path}: cannot import {name}: {described(fault, name)}") from fault
            here = [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]
            raise UserError(
                f"{key}={path}: there is no module '{name}'.{did_you_mean(name, here)} It is looked for "
                "in the current directory and among installed packages"
            ) from fault
        except Exception as fault:
            raise UserError(f"{key}={path}: cannot import {name}: {described(fault, name)}") from fault

    name, *parts = path.split(".")
    found: Any = import_one(name)
    for part in parts:
        folders = getattr(found, "__path__", [])
        if hasattr(found, part):
            found = getattr(found, part)
        elif folders and find_spec(f"{name}.{part}"):  # also for a folder without __init__.py
            found = import_one(f"{name}.{part}")
        else:
            inside = [module.name for module in pkgutil.iter_modules(folders)]
            public = [word for word in dir(found) if not word.startswith("_")]
            hint = did_you_mean(part, [*public, *inside])
            raise UserError(f"{key}={path}: {name} has no '{part}'.{hint}")
        name = f"{name}.{part}"
    return found


def described(fault: BaseException, module: str) -> str:
    """Type, text and place of ``fault``: the innermost line in the top-level package of ``module``."""
    text = " ".join(str(fault).split())
    said = f"{type(fault).__name__}: {shown(text, LONGEST)}" if text else type(fault).__name__
    if isinstance(fault, SyntaxError):
        return f"{said} ({fault.filename}, line {fault.lineno})"
    frames = list(walk_tb(fault.__traceback__))
    top = module.partition(".")[0]
    own = [at for at in frames if str(at[0].f_globals.get("__name__", "")).partition(".")[0] == top]
    if not own:
        return said
    frame, line = own[-1]
    return f"{said} ({frame.f_code.co_filename}, line {line})"
