"""Ed25519 signatures of packages: ``recpipe package ... sign=KEY``, ``recpipe serve ... trust=PUBKEY``.

The signature is of manifest.json, which has the digest of every file. Keys are PEM files, as
``openssl genpkey -algorithm ed25519`` writes them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from recpipe.answers.score import MANIFEST, SIGNATURE
from recpipe.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PrivateKey: TypeAlias = "Ed25519PrivateKey"
LARGEST = 1 << 16
"""Bytes of a key's file that are read."""


def private_key(file: Path) -> PrivateKey:
    """The key that ``sign=`` names; ``UserError`` if it is none."""
    _require_library("sign")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(file, "sign"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as fault:
        raise _no_key("sign", file, "private", "without a password") from fault
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key("sign", file, "private", "without a password")
    return key


def signed(key: PrivateKey, text: bytes) -> bytes:
    """The signature of ``text``, 64 bytes."""
    return key.sign(text)


def require_signed(directory: Path, trust: Path) -> None:
    """``UserError`` unless the manifest of the package ``directory`` is signed by the owner of the public key
    in the file ``trust``."""
    _require_library("trust")
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read(trust, "trust"))
    except (ValueError, UnsupportedAlgorithm) as fault:
        raise _no_key("trust", trust, "public", "of 'openssl pkey -pubout'") from fault
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key("trust", trust, "public", "of 'openssl pkey -pubout'")
    file = directory / SIGNATURE
    if file.is_symlink() or not file.is_file():
        raise UserError(f"{file} is missing, and trust={trust} asks for a signature: package with sign=KEY")
    try:
        key.verify(file.read_bytes()[:LARGEST], (directory / MANIFEST).read_bytes())
    except InvalidSignature:
        raise UserError(
            f"{file} is no signature of {MANIFEST} by the key that belongs to trust={trust}: the package is "
            "somebody else's, or was altered"
        ) from None


def _read(file: Path, word: str) -> bytes:
    try:
        with file.expanduser().open("rb") as stream:
            return stream.read(LARGEST)
    except OSError as fault:
        raise UserError(f"{word}={file}: cannot be read ({fault.strerror})") from fault


def _no_key(word: str, file: Path, kind: str, how: str) -> UserError:
    return UserError(
        f"{word}={file}: no {kind} Ed25519 key in PEM format, {how}; make one with 'openssl genpkey "
        "-algorithm ed25519'"
    )


def _require_library(word: str) -> None:
    if find_spec("cryptography") is None:
        raise UserError(f"{word}= needs cryptography, not installed here: pip install 'recpipe[sign]'")
