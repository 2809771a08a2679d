"""A shard's directory: the rows of some tables, or of parts of them.

shard0/
  shard.json              which shard of which cut it is, its lookups and tables, digests of the files
  shard.sha256            its own digest, as sha256sum writes it
  tables/*.safetensors    "rows" uint8 [rows, bytes of a row], as a package has them; for a pruned table
                          also "places" int32
  shard.sig               if asked for: the signature of shard.json, Ed25519
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from recpipe.answers import score
from recpipe.answers.manifest import PrivateKey, read_sealed, write_sealed
from recpipe.common.validation import STRICT, Count, Positive, one_of
from recpipe.errors import UserError

MANIFEST, DIGEST, SIGNATURE = "shard.json", "shard.sha256", "shard.sig"
OWN = "own"
"""The folder of a package's dense part with the tables that the main server looks up itself."""
HOT = "hot"
"""That with copies of rows of other tables; their files have the rows' numbers as "ids" int64, ascending."""
FORMAT: Literal["recpipe shard"] = "recpipe shard"


class Table(TypedDict):
    """Rows of a table."""

    rows: Positive
    """How many are here."""
    first: Count
    """The number of the first one in the whole table."""
    of: Positive
    """How many the whole table has."""
    dimension: Positive
    type: Annotated[str, one_of(*score.TYPES)]
    file: str


class Applied(TypedDict):
    """The latest delta in it; that of the base has the number 0."""

    base: str
    sequence: Count
    digest: str


class Lookup(TypedDict):
    """A lookup that is answered here, in part if the table is here in part."""

    number: Count
    table: str
    pooling: Literal["sum", "mean", "none"]
    weighted: bool


@with_config({**STRICT, "extra": "ignore"})
class Content(TypedDict):
    """What is read of shard.json, with its types."""

    format: Literal["recpipe shard"]
    schema: Literal[1]
    name: str
    """Of the model, in the open inference protocol."""
    version: str
    """Of the cut: the main server asks for this one."""
    shard: Count
    shards: Positive
    step: Count
    applied: NotRequired[Applied]
    plan: NotRequired[str]
    """The digest of plan.json; not in cuts of earlier versions, and ``applied`` neither."""
    lookups: list[Lookup]
    tables: dict[str, Table]
    files: dict[str, str]


def is_shard(directory: Path) -> bool:
    """Whether ``directory`` looks like a shard, whole or not."""
    return (directory / MANIFEST).is_file()


def read_shard(directory: Path, trust: Path | None = None) -> Content:
    """What a shard's directory holds, all of whose files are whole; ``UserError`` names what is not, and what
    the owner of the public key ``trust`` has not signed."""
    file = directory / MANIFEST
    content: Content
    content, _ = read_sealed(
        Content,
        directory,
        (MANIFEST, DIGEST, SIGNATURE),
        "a shard",
        absent="make shards with 'recpipe shard PACKAGE DIRECTORY shards=N'",
        remedy="cut the package anew",
        trust=trust,
    )
    try:
        with score.readable(directory):
            about: dict[str, Any] = {**content, "sparse": [], "lookups": []}
            score.check_tables(directory, about)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    unknown = next((own for own in content["lookups"] if own["table"] not in content["tables"]), None)
    if unknown is not None:
        raise UserError(f"{file} has a lookup of '{unknown['table']}', which is not there: cut anew")
    return content


def write_shard(directory: Path, content: Mapping[str, Any], key: PrivateKey | None = None) -> None:
    """Write shard.json with the digest of every other file in ``directory``, its own digest, and its
    signature by ``key``; all of it is on the disk on return."""
    told = {"format": FORMAT, "schema": 1, **content}
    write_sealed(directory, (MANIFEST, DIGEST, SIGNATURE), told, key)
