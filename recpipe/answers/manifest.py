"""A package's manifest.json, the digests of its files, and its signature: ``recpipe package ... sign=KEY``,
``recpipe serve ... trust=PUBKEY``.

The signature is of manifest.json, which has the digest of every file. Keys are PEM files of Ed25519, as
``openssl genpkey -algorithm ed25519`` writes them.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeAlias

import torch
from annotated_types import Interval
from pydantic import with_config
from typing_extensions import TypedDict

from recpipe.answers.score import (
    DIGEST,
    MANIFEST,
    SCHEMA,
    SIGNATURE,
    TYPES,
    WITH_EFFECTS,
    WITH_MAPS,
    WITH_SHARDS,
    PackageError,
    check_files,
    sealed,
)
from recpipe.common.files import sync
from recpipe.common.saved import read_json
from recpipe.common.validation import STRICT, Count, Positive, fitted, one_of
from recpipe.common.versions import FBGEMM, installed_version
from recpipe.errors import UserError, shown
from recpipe.model.scores import Kind

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = "recpipe package"
RETRIEVAL = "retrieval"
"""Of the manifest of a package that finds candidates."""
SHARDS = "shards"
"""Of the manifest of a package whose tables are held by shards."""
PrivateKey: TypeAlias = "Ed25519PrivateKey"
LARGEST_KEY = 1 << 16
"""Bytes of a key's file that are read."""


def read_manifest(directory: Path, trust: Path | None = None, sharded: bool = False) -> dict[str, Any]:
    """The manifest of the package ``directory``, read as a recipe is. Nothing of the package has run then,
    and its other files have not been read.

    ``trust``: the public key that must have signed it. ``sharded``: its tables may be held by shards.
    ``UserError`` names what is missing or wrong.
    """
    file = directory / MANIFEST
    try:
        manifest = sealed(directory)
        if trust is not None:
            require_signed(directory, trust)
    except PackageError as fault:
        raise UserError(str(fault)) from fault
    except OSError as fault:
        raise UserError(f"cannot read {fault.filename or file}: {fault.strerror}") from fault
    content: Content = fitted(Content, manifest, str(file))
    if SHARDS in content and not sharded:
        raise UserError(
            f"{directory} is the dense part of a package whose tables are held by shards: serve it with "
            "shards=HOST:PORT,..., and give other commands the package that was cut"
        )
    features = [feature["name"] for feature in content["sparse"]]
    outputs = [output["name"] for output in content["outputs"]]
    tables, reference = content["tables"], content.get("reference")
    unknown = [
        *(own for f in content["sparse"] if (own := f.get("map")) and own not in content.get("maps", {})),
        *(name for name in (*features, *outputs) if (features + outputs).count(name) > 1),
        *(name for lookup in content["lookups"] for name, _ in lookup["parts"] if name not in features),
        *(name for lookup in content["lookups"] for _, name in lookup["parts"] if name not in tables),
        *(name for name in outputs if reference and name not in reference["tasks"]),
        *(name for name in features if reference and name not in reference["features"]),
        *(own["entity"] for own in content.get("effects", ()) if own["entity"] not in features),
    ]
    sequences = content.get("sequences")
    for group in [sequences["single"], *sequences["aligned"]] if sequences else []:
        unknown += [name for name in group if name not in features]
    if unknown or not outputs:
        raise UserError(
            f"{file}: '{shown(unknown[0]) if unknown else 'outputs'}' stands for nothing there, or for two "
            "things: package the checkpoint anew"
        )
    return manifest


def versions() -> dict[str, str]:
    """What made the package."""
    fbgemm = next(filter(None, map(installed_version, reversed(FBGEMM))), "unknown")
    return {
        "recpipe": installed_version("recpipe") or "not installed",
        "torch": torch.__version__,
        "torchrec": version("torchrec"),
        "fbgemm_gpu": fbgemm,
        "python": platform.python_version(),
    }


def write_manifest(
    directory: Path, content: Mapping[str, Any], key: PrivateKey | None = None
) -> dict[str, Any]:
    """Write manifest.json with the digest of every other file in ``directory``, then its own digest, and its
    signature by ``key``."""
    schema = WITH_MAPS if "maps" in content else SCHEMA
    schema = WITH_EFFECTS if "effects" in content else schema
    schema = WITH_SHARDS if SHARDS in content else schema
    told = {"format": FORMAT, "schema": schema, **content}
    manifest: dict[str, Any]
    manifest, _ = write_sealed(directory, (MANIFEST, DIGEST, SIGNATURE), told, key)
    return manifest


def is_package(directory: Path) -> bool:
    """Whether ``directory`` looks like a package, whole or not."""
    return (directory / MANIFEST).is_file() and (directory / DIGEST).is_file()


def private_key(file: Path) -> PrivateKey:
    """The key that ``sign=`` names; ``UserError`` if it is none."""
    key: PrivateKey = _loaded_key("sign", file)
    return key


def require_signed(directory: Path, trust: Path) -> None:
    """``UserError`` unless the manifest of the package ``directory`` is signed by the owner of the public key
    in the file ``trust``."""
    require_signed_file(directory / MANIFEST, directory / SIGNATURE, trust)


def require_signed_file(signed: Path, file: Path, trust: Path) -> None:
    """``UserError`` unless ``file`` has the signature of ``signed`` by the owner of the public key in
    ``trust``."""
    key = _loaded_key("trust", trust)
    if file.is_symlink() or not file.is_file():
        raise UserError(f"{file} is missing, and trust={trust} asks for a signature: make it with sign=KEY")
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(file.read_bytes()[:LARGEST_KEY], signed.read_bytes())
    except InvalidSignature:
        raise UserError(
            f"{file} is no signature of {signed.name} by the key that belongs to trust={trust}: it is "
            "somebody else's, or was altered"
        ) from None


def _loaded_key(word: str, file: Path) -> Any:
    """The private key that ``sign=`` names, or the public one of ``trust=``; ``UserError`` if it is none."""
    if find_spec("cryptography") is None:
        raise UserError(f"{word}= needs cryptography, not installed here: pip install 'recpipe[sign]'")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    try:
        with file.expanduser().open("rb") as stream:
            pem = stream.read(LARGEST_KEY)
    except OSError as fault:
        raise UserError(f"{word}={file}: cannot be read ({fault.strerror})") from fault
    private = word == "sign"
    key: object = None
    cause: Exception | None = None
    try:
        if private:
            key = serialization.load_pem_private_key(pem, None)
        else:
            key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as fault:
        cause = fault
    if not isinstance(key, Ed25519PrivateKey if private else Ed25519PublicKey):
        kind, how = ("private", "without a password") if private else ("public", "of 'openssl pkey -pubout'")
        raise UserError(
            f"{word}={file}: no {kind} Ed25519 key in PEM format, {how}; make one with 'openssl genpkey "
            "-algorithm ed25519'"
        ) from cause
    return key


Tolerance = Annotated[float, Interval(ge=0)]


class _Dense(TypedDict):
    names: list[str]
    transform: dict[str, Any]


class _Feature(TypedDict):
    name: str
    rows: Positive
    ids: dict[str, Any]
    weights: NotRequired[Literal["given", "mean"]]
    map: NotRequired[str]


class _Map(TypedDict):
    file: str
    ids: Count


class _Lookup(TypedDict):
    pooling: Literal["sum", "mean", "none"]
    parts: list[tuple[str, str]]
    weighted: NotRequired[bool]


class _Table(TypedDict):
    rows: Positive
    dimension: Positive
    type: Annotated[str, one_of(*TYPES)]
    file: NotRequired[str]


class _Output(TypedDict):
    name: str
    kind: Kind


class _Compiled(TypedDict):
    machine: str
    instruction_set: str
    cpu_flags: list[str]


_Program = TypedDict(
    "_Program",
    {"file": str, "constants": str | None, "from": Count, "golden": str, "tolerance": Tolerance},
)


class _GoldenProgram(TypedDict):
    file: str
    golden: str
    tolerance: Tolerance
    low: bool


class _Golden(TypedDict):
    programs: list[_GoldenProgram]


class _Layer(TypedDict):
    type: str
    most: int


class _Sequences(TypedDict):
    single: list[str]
    aligned: list[list[str]]


class _Retrieval(TypedDict):
    item: str
    kind: str
    items: Positive
    dim: Positive
    user: list[str]
    ids: Annotated[str, one_of("text", "numbers")]


class _Effect(TypedDict):
    entity: str
    inputs: list[str]
    width: Positive
    ids: str
    file: str


class _Shards(TypedDict):
    version: str
    models: list[str]
    parts: dict[str, list[tuple[Count, Count, Positive]]]
    default_rows: str


class _Popularity(TypedDict):
    file: str
    samples: Count


class _Figure(TypedDict):
    value: float | None
    low: float | None
    high: float | None


class _Means(TypedDict):
    prediction: float | None
    label: float | None


class _TaskFigures(TypedDict):
    kind: Kind
    edges: list[float]
    counts: list[float]
    lowest: float | None
    highest: float | None
    mean: _Means
    saturated: float | None
    figures: dict[str, _Figure]


class _FeatureFigures(TypedDict):
    ids_per_sample: float
    row_0: float | None
    unknown: NotRequired[float]


class _Reference(TypedDict):
    samples: Positive
    tasks: dict[str, _TaskFigures]
    features: dict[str, _FeatureFigures]


@with_config({**STRICT, "extra": "ignore"})
class Content(TypedDict):
    """What is read of manifest.json, with its types; other keys are for people."""

    format: Literal["recpipe package"]
    schema: Literal[2, 3, 4, 5]
    step: Count
    versions: dict[str, str]
    dense: _Dense
    sparse: list[_Feature]
    lookups: list[_Lookup]
    tables: dict[str, _Table]
    layers: dict[str, _Layer]
    outputs: list[_Output]
    compiled: _Compiled
    programs: list[_Program]
    golden: _Golden
    files: dict[str, str]
    maps: NotRequired[dict[str, _Map]]
    sequences: NotRequired[_Sequences]
    reference: NotRequired[_Reference | None]
    popularity: NotRequired[_Popularity]
    encoding: NotRequired[str]
    retrieval: NotRequired[_Retrieval]
    effects: NotRequired[list[_Effect]]
    shards: NotRequired[_Shards]
    last_layer: NotRequired[Positive]


def write_sealed(
    directory: Path, names: tuple[str, str, str], content: Mapping[str, Any], key: PrivateKey | None = None
) -> tuple[Any, str]:
    """Write the manifest of a ``directory``: ``content``, and as its ``files`` the digest of every other file
    there. Returns it, and its own digest.

    ``names``: see ``read_sealed``; the signature is by ``key``, None: there is none. All of the directory is
    on the disk on return, and can be read by everybody: the server may be another user.
    """
    for name in names:
        (directory / name).unlink(missing_ok=True)
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    digests = {}
    for file in files:
        with file.open("rb") as stream:
            own = hashlib.file_digest(stream, "sha256").hexdigest()
        digests[file.relative_to(directory).as_posix()] = own
    told = {**content, "files": digests}
    text = json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False).encode()
    found = hashlib.sha256(text).hexdigest()
    manifest, digest, signature = (directory / name for name in names)
    manifest.write_bytes(text)
    digest.write_text(f"{found}  {manifest.name}\n")  # as sha256sum writes and checks it
    written = [manifest, digest]
    if key is not None:
        signature.write_bytes(key.sign(text))
        written.append(signature)
    for file in (*files, *written):
        file.chmod(0o644)
        sync(file)
    for folder in {file.parent for file in files} | {directory}:
        sync(folder)
    return told, found


def read_sealed(
    kind: Any,
    directory: Path,
    names: tuple[str, str, str],
    what: str,
    *,
    absent: str,
    remedy: str,
    trust: Path | None,
) -> tuple[Any, str]:
    """The manifest of a ``directory``, of this ``kind`` of typed dictionary, and its digest, after all files
    were found to be as it says (its ``files``).

    ``names``: of the manifest, of what holds its digest as sha256sum writes it, and of its signature, which
    is asked for if there is a public key to ``trust``. ``UserError`` for the first fault: ``what`` it should
    be the manifest of, what to do where there is none (``absent``), and else (``remedy``).
    """
    manifest, digest, signature = names
    file = directory / manifest
    try:
        text, told = file.read_bytes(), (directory / digest).read_bytes()
    except OSError as fault:
        raise UserError(f"cannot read {fault.filename}: {fault.strerror}; {absent}") from fault
    found = hashlib.sha256(text).hexdigest()
    if told != f"{found}  {manifest}\n".encode():
        raise UserError(f"{file} is not as it was written ({digest}): {remedy}")
    if trust is not None:
        require_signed_file(file, directory / signature, trust)
    try:
        content = fitted(kind, read_json(file), str(file))
    except (OSError, ValueError) as fault:
        raise UserError(f"{file} is no manifest of {what} ({fault}): {remedy}") from fault
    try:
        check_files(directory, content["files"], names)
    except PackageError as fault:
        raise UserError(str(fault)) from fault
    return content, found
