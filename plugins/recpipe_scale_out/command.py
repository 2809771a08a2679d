"""``recpipe shard``: cuts a package into its dense part and shards."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from recpipe_perf_model import Costs

from recpipe.answers import score
from recpipe.answers.manifest import is_package, private_key, read_manifest
from recpipe.answers.package import WORDS, Options, beside, package_for
from recpipe.common.console import alone, capture_logs
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.process import quieted
from recpipe.common.words import Amount, readable_bytes
from recpipe.errors import UserError
from recpipe.tasks.process import prepare_process
from recpipe_scale_out.config import CutConfig, of_words
from recpipe_scale_out.cutting import MAIN, PLAN, write_cut
from recpipe_scale_out.facts import facts_of
from recpipe_scale_out.plan import hottest, named_plan, require_plan

log = logging.getLogger("recpipe")


def shard_command(words: Sequence[str]) -> int:
    """``recpipe shard PACKAGE DIRECTORY shards=N [plan=load] ...``; returns 0.

    In the place of a package there may be what ``recpipe package`` makes one of: then it is made first, with
    the words of that command. A package is made anew if there are such words, too.
    """
    if not any(word.startswith("shards=") for word in words[2:]):
        raise UserError("recpipe shard needs the number of servers that hold the tables: shards=N")
    own = {field.name for field in fields(CutConfig)}
    others = {word.partition("=")[0]: word.partition("=")[2] for word in words[2:]}
    of_package = {key: value for key, value in others.items() if key in WORDS and key not in own}
    mine = [word for word in words[2:] if word.partition("=")[0] not in of_package]
    config = of_words(CutConfig, mine, "shard", WORDS)
    source, directory = (Path(word).expanduser() for word in words[:2])
    prepare_process()
    require_new(directory, config)
    if is_package(source) and not of_package:
        with alone(), quieted(), capture_logs(None):
            cut(source, directory, config)
        return 0
    options = Options(**of_package)
    for key in ("memory", "main"):  # before what takes long
        _bytes(key, getattr(config, key))
    require_plan(config.plan)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as folder:
        package = package_for(source, Path(folder) / "model.recpipe", None, options, screen=True)
        with alone(), quieted(), capture_logs(None):
            cut(package, directory, config)
    return 0


def require_new(directory: Path, config: CutConfig) -> None:
    """``UserError`` if there is something in ``directory`` that is not to be replaced."""
    free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not free and not ((directory / PLAN).is_file() and (directory / MAIN).is_dir()):
        raise UserError(f"{directory} exists and is no cut package: name another directory, or remove it")
    require_absent("", directory, config.overwrite)


def cut(package: Path, directory: Path, config: CutConfig) -> None:
    """Write ``package`` in parts into ``directory``. ``UserError`` if it is none, if there is no such plan,
    or if there is something else already."""
    key = None if config.sign is None else private_key(Path(config.sign))
    memory, main = (_bytes(key, getattr(config, key)) for key in ("memory", "main"))
    require_new(directory, config)
    manifest = read_manifest(package)
    try:
        score.verified(package)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    facts = facts_of(package, manifest)
    known = None if config.costs is None else Costs.read(Path(config.costs).expanduser())
    parts = named_plan(config.plan, facts, config.shards, memory, config.split_rows, main or 0, known)
    held = [0] * (config.shards + 1)
    for name, own in parts.items():
        for shard, _, rows in own:
            held[shard] += rows * facts[name].row_bytes
    *of_shards, at_main = held
    at_shards = {name: facts[name] for name, own in parts.items() if own[0][0] < config.shards}
    hot = hottest(at_shards, (main or 0) - at_main)
    with written_alone("", directory, config.overwrite, ("shard", str(package))), beside(directory) as folder:
        write_cut(package, manifest, facts, parts, config.shards, folder, key, hot, config.overlap)
    cut_tables = [name for name, own in parts.items() if len(own) > 1]
    log.info(
        "wrote %s: %d tables on %d shards, %s to %s each%s%s%s",
        *(directory, len(facts), config.shards),
        *map(readable_bytes, (min(of_shards), max(of_shards))),
        f"; {readable_bytes(at_main)} of whole tables at the main server" if at_main else "",
        f"; copies of {sum(map(len, hot.values())):,} rows of {len(hot)} others there" if hot else "",
        f"; by rows: {', '.join(cut_tables)}" if cut_tables else "",
    )


def _bytes(key: str, text: str | None) -> int | None:
    """The bytes that ``key=text`` says; None if it is not said."""
    if text is None:
        return None
    amount = Amount.parsed(text, key)
    if amount.is_share or amount.number < 1:
        raise UserError(f"{key}={text}: give bytes, such as 8GiB")
    return int(amount.number)
