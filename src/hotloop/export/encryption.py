r"""Files under AES-256-GCM, in chunks, so that the memory that it takes does not grow with the file.

The construction is STREAM (Hoang, Reyhanitabar, Rogaway and Vizár, CRYPTO 2015), as age and Tink have it: each file
has a key of its own, derived from the secret and a random salt by HKDF-SHA-256; a chunk's nonce is its number and
whether it is the last. So chunks that were changed, moved, repeated or left out do not open; no nonce is used twice.

`hotloop aes-256-gcm\n` (20 bytes), salt (32), then chunks of 1 MiB, each with its tag (16) behind it.
"""

from collections.abc import Iterator
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SCHEME = "aes-256-gcm"
MAGIC = f"hotloop {SCHEME}\n".encode()
CHUNK = 2**20
_SALT, _TAG = 32, 16


class Readable(Protocol):
    """What bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """At most so many, fewer only at the end."""


class NotOpened(Exception):
    """A file is no encrypted one, is not whole, or the secret is another."""


def encrypted(plain: Readable, secret: bytes, salt: bytes) -> Iterator[bytes]:
    """The encrypted file, piece by piece.

    Args:
        secret: 32 bytes.
        salt: 32 random bytes, for this file alone.
    """
    yield MAGIC + salt
    cipher = _cipher(secret, salt)
    for number, chunk, last in _chunks(plain, CHUNK):
        yield cipher.encrypt(_nonce(number, last), chunk, None)


def decrypted(sealed: Readable, secret: bytes) -> Iterator[bytes]:
    """The plain file, piece by piece: whole if this ends without an error, and not before.

    Raises:
        NotOpened: at the first chunk that does not open.
    """
    start = sealed.read(len(MAGIC) + _SALT)
    if len(start) != len(MAGIC) + _SALT or not start.startswith(MAGIC):
        raise NotOpened("it is no file that hotloop has encrypted")
    cipher = _cipher(secret, start[len(MAGIC) :])
    for number, chunk, last in _chunks(sealed, CHUNK + _TAG):
        try:
            yield cipher.decrypt(_nonce(number, last), chunk, None)
        except (InvalidTag, ValueError):  # ValueError: shorter than a tag
            raise NotOpened(f"chunk {number} does not open with this secret") from None


def _chunks(file: Readable, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """Number, content, and whether it is the last; an empty file is one empty chunk."""
    number, chunk = 0, file.read(size)
    while True:
        following = file.read(size)
        yield number, chunk, not following
        if not following:
            return
        number, chunk = number + 1, following


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _cipher(secret: bytes, salt: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), length=32, salt=salt, info=MAGIC).derive(secret))
