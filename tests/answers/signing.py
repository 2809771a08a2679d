"""Pairs of keys for tests of signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_pair(folder: Path, name: str, key: Any) -> None:
    """Write the private ``key`` and its public one, name.pem and name.pub."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / f"{name}.pem").write_bytes(private)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)


def made_keys(folder: Path) -> Path:
    """``folder`` with two pairs of Ed25519: mine.pem, mine.pub, other.pem, other.pub."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for name in ("mine", "other"):
        write_pair(folder, name, Ed25519PrivateKey.generate())
    return folder
