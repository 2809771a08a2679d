"""``recpipe shard``: cuts a package into its dense part and shards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from recpipe.answers import score
from recpipe.answers.manifest import private_key, read_manifest
from recpipe.answers.package import beside
from recpipe.common.console import alone, capture_logs
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.process import quieted
from recpipe.common.words import Amount, readable_bytes
from recpipe.errors import UserError
from recpipe.tasks.process import prepare_process
from recpipe_scale_out.config import CutConfig, of_words
from recpipe_scale_out.cutting import MAIN, PLAN, write_cut
from recpipe_scale_out.facts import facts_of
from recpipe_scale_out.plan import named_plan

log = logging.getLogger("recpipe")


def shard_command(words: Sequence[str]) -> int:
    """``recpipe shard PACKAGE DIRECTORY shards=N [plan=load] ...``; returns 0."""
    if not any(word.startswith("shards=") for word in words[2:]):
        raise UserError("recpipe shard needs the number of servers that hold the tables: shards=N")
    config = of_words(CutConfig, words[2:], "shard")
    prepare_process()
    with alone(), quieted(), capture_logs(None):
        cut(Path(words[0]).expanduser(), Path(words[1]).expanduser(), config)
    return 0


def cut(package: Path, directory: Path, config: CutConfig) -> None:
    """Write ``package`` in parts into ``directory``. ``UserError`` if it is none, if there is no such plan,
    or if there is something else already."""
    key = None if config.sign is None else private_key(Path(config.sign))
    memory, main = (_bytes(key, getattr(config, key)) for key in ("memory", "main"))
    free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not free and not ((directory / PLAN).is_file() and (directory / MAIN).is_dir()):
        raise UserError(f"{directory} exists and is no cut package: name another directory, or remove it")
    require_absent("", directory, config.overwrite)
    manifest = read_manifest(package)
    try:
        score.verified(package)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    facts = facts_of(package, manifest)
    parts = named_plan(config.plan, facts, config.shards, memory, config.split_rows, main or 0)
    with written_alone("", directory, config.overwrite, ("shard", str(package))), beside(directory) as folder:
        write_cut(package, manifest, facts, parts, config.shards, folder, key)
    held = [0] * (config.shards + 1)
    for name, own in parts.items():
        for shard, _, rows in own:
            held[shard] += rows * facts[name].row_bytes
    cut_tables = [name for name, own in parts.items() if len(own) > 1]
    *of_shards, at_main = held
    log.info(
        "wrote %s: %d tables on %d shards, %s to %s each%s%s",
        *(directory, len(facts), config.shards),
        *map(readable_bytes, (min(of_shards), max(of_shards))),
        f"; {readable_bytes(at_main)} at the main server" if at_main else "",
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
