"""Keys: Ed25519 pairs that sign models, and secrets that encrypt them."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from hotloop.core.errors import InputError, cannot_write
from hotloop.core.files import fsync_directory

_LARGEST = 2**16
"""Bytes of a file of a key; no key has a hundredth of that."""

_FIX = "hotloop export key FILE makes a pair"
_MAKE_ONE = "hotloop export key --secret FILE makes one"


def make_pair(file: Path) -> tuple[Path, str]:
    """Write a new private key, readable by its owner alone, and its public key beside it, with `.pub` added.

    Returns:
        the public key's file, and the key in hexadecimal.

    Raises:
        InputError: one of the files is there, or cannot be written.
    """
    private, public = Ed25519PrivateKey.generate(), file.with_name(file.name + ".pub")
    _refuse_existing(public)
    _write_new(file, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _write_new(public, private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)
    return public, name_of(private.public_key())


def make_secret(file: Path) -> None:
    """Write a new 256-bit secret, 64 hexadecimal digits, readable by its owner alone.

    Raises:
        InputError: the file is there, or cannot be written.
    """
    _write_new(file, f"{secrets.token_hex(32)}\n".encode(), 0o600)


def name_of(key: Ed25519PublicKey) -> str:
    """The key itself, in hexadecimal."""
    return key.public_bytes_raw().hex()


def read_private(file: Path) -> Ed25519PrivateKey:
    """A private key from its PEM file.

    Raises:
        InputError: it cannot be read, is encrypted, or is another kind of key.
    """
    content = _read(file, _FIX)
    try:
        key = load_pem_private_key(content, None)
    except TypeError:
        cause = "it is protected by a password, which hotloop does not ask for"
        raise InputError(f"{file} cannot be used to sign", cause, _FIX) from None
    except (ValueError, UnsupportedAlgorithm):
        cause = "it is a public key" if b"PUBLIC KEY" in content else "it is no private key in PEM"
        raise InputError(f"{file} cannot be used to sign", cause, _FIX) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{file} cannot be used to sign", "it is a key of another kind than Ed25519", _FIX)
    return key


def read_public(file: Path) -> Ed25519PublicKey:
    """A public key from its PEM file.

    Raises:
        InputError: it cannot be read, is a private key, or one of another kind.
    """
    content = _read(file, _FIX)
    if b"PRIVATE KEY" in content:
        cause = "it is a private key, which signs and stays with its owner"
        raise InputError(f"{file} is no public key", cause, f"name the public one: {file}.pub")
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{file} is no public key", "it is not one in PEM", _FIX) from None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{file} cannot verify", "it is a key of another kind than Ed25519", _FIX)
    return key


def read_secret(place: str) -> bytes:
    """A secret from a file, or from an environment variable as `env:NAME`.

    Raises:
        InputError: there is none. What is there is never told.
    """
    if place.startswith("env:"):
        text = os.environ.get(place[4:], "")
        if not text:
            raise InputError(f"{place}: there is no such variable, or it is empty", "it holds the secret", _MAKE_ONE)
    else:
        text = _read(Path(place), _MAKE_ONE).decode("ascii", "replace")
    with suppress(ValueError):
        if len(found := bytes.fromhex(text.strip())) == 32:
            return found
    raise InputError(f"{place} holds no secret", "one is 64 hexadecimal digits, 256 bits", _MAKE_ONE)


def _read(file: Path, fix: str) -> bytes:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}", error.strerror or str(error), fix) from None
    if len(content) > _LARGEST:
        raise InputError(f"{file} is no key", f"it has more than {_LARGEST:,} bytes", fix)
    return content


def _refuse_existing(file: Path) -> None:
    if os.path.lexists(file):
        raise InputError(f"{file} is there already", "a key is never written over", "choose another name")


def _write_new(file: Path, content: bytes, mode: int) -> None:
    _refuse_existing(file)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise cannot_write(file, error, InputError, "hotloop export key FILE") from None
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(descriptor)
        fsync_directory(file.parent)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise cannot_write(file, error, InputError, "hotloop export key FILE") from None
