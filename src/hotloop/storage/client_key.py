"""Encryption before anything leaves: files in the age format (age-encryption.org/v1), by keys that stay here.

What was cut short, changed or put together from other files does not decrypt. age itself reads the files:
`age --decrypt -i KEYFILE`.
"""

import os
import stat
from pathlib import Path
from typing import Any, Protocol

from hotloop.core.errors import CheckpointError, InputError, cannot_write

SUFFIX = ".age"
_BEGINNING = "AGE-SECRET-KEY-1"
_MAKE = "hotloop storage key FILE"
_MOST_BYTES = 1 << 16
"""Of a file with keys."""


class Reads(Protocol):
    """Something that is open for reading."""

    def read(self, size: int = -1, /) -> bytes:
        """So many bytes at the most; none at the end."""


class Writes(Protocol):
    """Something that is open for writing."""

    def write(self, content: bytes, /) -> int:
        """How many bytes were taken."""

    def flush(self) -> None:
        """Nothing waits after it."""


class WrongKey(CheckpointError):
    """A file was encrypted for another key, or its beginning was changed: the two cannot be told apart."""


class Damaged(CheckpointError):
    """A file is not as it was encrypted."""


class ClientKey:
    """Keys of age: the first one encrypts, each decrypts.

    Args:
        setting: `storage.client_key`; `file:PATH` with one key a line, which nobody else may read, or `env:VARIABLE`.

    Raises:
        InputError: there is no such key, others may read it, or pyrage is not installed.
    """

    def __init__(self, setting: str) -> None:
        self._age = _age()
        kind, _, place = setting.partition(":")
        text = _of_file(Path(place).expanduser()) if kind == "file" else _of_variable(place)
        lines = [line for line in text.split() if line.startswith(_BEGINNING)]
        try:
            self._identities: list[Any] = [self._age.x25519.Identity.from_str(line) for line in lines]
        except self._age.IdentityError:
            self._identities = []
        if not self._identities:
            raise InputError(f"storage.client_key: no key of age in {place}", f"it begins {_BEGINNING}", _MAKE)

    def encrypt(self, source: Path, target: Path) -> None:
        """Encrypt a file, 64 KiB at a time; about 1 s a GB.

        Raises:
            OSError: it cannot be read, or the other one not written.
        """
        with source.open("rb") as plain, target.open("wb") as encrypted:
            self._age.encrypt_io(plain, encrypted, [self._identities[0].to_public()])

    def decrypt(self, source: Path, target: Path) -> None:
        """Decrypt a file, 64 KiB at a time; about 4 s a GB. What was written before an error must not be used.

        Raises:
            WrongKey: it is for another key.
            Damaged: it is not as it was encrypted.
            OSError: it cannot be read, or the other one not written.
        """
        with source.open("rb") as encrypted, target.open("wb") as plain:
            self.decrypt_stream(encrypted, plain, source.name)

    def decrypt_stream(self, encrypted: Reads, plain: Writes, name: str) -> None:
        """As `decrypt`, of what is called `name` in what it raises."""
        try:
            self._age.decrypt_io(encrypted, plain, self._identities)
        except self._age.DecryptError as error:
            cause = f"{' '.join(str(error).split())}: it was encrypted for another key, or its beginning was changed"
            fix = "name the key that it was written with: --set storage.client_key=..."
            raise WrongKey(f"{name} does not decrypt", cause, fix) from None
        except OSError as error:
            if error.errno is not None:  # of the disk or the store; age's own have no number
                raise
            cause = "it was cut short or changed after it was encrypted"
            raise Damaged(f"{name} does not decrypt", cause, "use an earlier one") from None


def make_key(file: Path) -> None:
    """Write a new key that its owner alone may read.

    Raises:
        InputError: the file is there, or cannot be written, or pyrage is not installed.
    """
    identity = _age().x25519.Identity.generate()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        cause = "what was encrypted with it could never be read again"
        raise InputError(f"{file} is there, and is not replaced", cause, "name another file") from None
    except OSError as error:
        raise cannot_write(file, error, InputError, _MAKE) from None
    with os.fdopen(descriptor, "w") as opened:
        opened.write(f"{identity}\n")
        opened.flush()
        os.fsync(opened.fileno())


def _of_file(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                mode = f"its mode is {stat.S_IMODE(found.st_mode):04o}"
                raise InputError(f"storage.client_key: others may read {file}", mode, f"chmod 600 {file}")
            return opened.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise InputError(f"storage.client_key: cannot read {file}", error.strerror or str(error), _MAKE) from None


def _of_variable(name: str) -> str:
    if not os.environ.get(name):
        fix = f"export {name}=... before it starts, from where secrets are kept"
        raise InputError(f"storage.client_key: {name} is not set", "the key is read from that variable", fix)
    return os.environ[name]


def _age() -> Any:
    try:
        import pyrage
    except ImportError:
        what = "copies are encrypted by pyrage"
        raise InputError(what, "it is not installed", 'pip install "hotloop[s3]"') from None
    return pyrage
