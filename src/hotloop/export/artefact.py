"""An exported model on the disk: the file itself, what is said of it, and who says so.

```
model.onnx                 plain for other tools, unless it is encrypted
model.onnx.data            weights beyond the 2 GB that one ONNX file holds
model.onnx.manifest.json   hashes of both, preprocessing, metrics, versions
model.onnx.manifest.sig    Ed25519 over that file's bytes, 64 bytes
```
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from hotloop.core.errors import FIXES, HotloopError, InputError
from hotloop.core.files import fsync_directory, lock_at_once, write_atomic
from hotloop.export.manifest import Manifest, StoredFile, parse

if TYPE_CHECKING:  # what is neither signed nor encrypted needs no cryptography
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

DATA, MANIFEST, SIGNATURE = ".data", ".manifest.json", ".manifest.sig"

_LARGEST_MANIFEST = 2**24
"""Bytes; names of 100,000 classes are a tenth of that."""
_SIGNATURE_BYTES = 64
_PIECE = 2**20


class UnverifiedModel(HotloopError):
    """A model is not as it was exported, or not by whom it should be."""


@dataclass(frozen=True)
class Verified:
    """A model whose files are those of its manifest.

    Attributes:
        trusted: the manifest is signed by the key that was asked for.
    """

    manifest: Manifest
    trusted: bool


def beside(model: Path, suffix: str) -> Path:
    """What goes with a model, by `DATA`, `MANIFEST` or `SIGNATURE`."""
    return model.with_name(model.name + suffix)


def verify(model: Path, key: "Ed25519PublicKey | None" = None) -> Verified:
    """Compare a model's files with its manifest, and that with its signature. About 1 s a GB.

    Args:
        key: by which it has to be signed; without it, whoever has signed it must have signed just this, and one that
            nobody has is only compared with its hashes.

    Raises:
        InputError: there is no such file, or it cannot be read.
        UnverifiedModel: it is not as it was exported, or the key is another.
    """
    verified = _manifest(model, key)
    for file, stored in _files(model, verified.manifest):
        with _opened(file, stored) as hashed:
            hashed.finish()
    return verified


def load(
    model: Path, key: "Ed25519PublicKey | None" = None, secret: bytes | None = None
) -> tuple[Verified, list[bytes]]:
    """Verify a model as `verify` does and give its files' content, decrypted; nothing is written to the disk.

    What is given is what was verified, whatever happens to the files meanwhile.

    Raises:
        InputError: as `verify`; or it is encrypted and the secret is missing or another.
        UnverifiedModel: as `verify`.
    """
    verified = _manifest(model, key)
    sealed = bool(verified.manifest.encryption)
    if sealed and secret is None:
        raise InputError(f"{model} is encrypted", "no secret was given", "--decrypt FILE, or --decrypt env:NAME")
    contents = []
    for file, stored in _files(model, verified.manifest):
        with _opened(file, stored) as hashed:
            content = _decrypted(hashed, secret) if sealed and secret else hashed.read(stored.bytes)
            hashed.finish()
        if content is None:
            raise InputError(f"{file} does not open", "the secret is another than the one it was encrypted with",
                             "--decrypt with that one")  # fmt: skip
        contents.append(content)
    return verified, contents


class _Hashed:
    """A file that is hashed as it is read."""

    def __init__(self, path: Path, file: BinaryIO, stored: StoredFile) -> None:
        self._path, self._file, self._stored = path, file, stored
        self._digest = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        content = self._file.read(size)
        self._digest.update(content)
        return content

    def finish(self) -> None:
        """Read what is left.

        Raises:
            UnverifiedModel: it is not what was stored.
        """
        while self.read(_PIECE):
            pass
        if self._digest.hexdigest() != self._stored.sha256:
            cause = f"its SHA-256 is {self._digest.hexdigest()}, exported was {self._stored.sha256}"
            raise _refused(f"{self._path} was changed", cause)


@contextmanager
def _opened(path: Path, stored: StoredFile) -> Iterator[_Hashed]:
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != stored.bytes:
            raise _refused(f"{path} was changed", f"it has {size:,} bytes, exported were {stored.bytes:,}")
        yield _Hashed(path, file, stored)


def _decrypted(hashed: _Hashed, secret: bytes) -> bytes | None:
    """None: it does not open."""
    from hotloop.export.encryption import NotOpened, decrypted

    try:
        return b"".join(decrypted(hashed, secret))
    except NotOpened:  # whether it was changed or the secret is another is for the hash to say
        return None


def _files(model: Path, manifest: Manifest) -> Iterator[tuple[Path, StoredFile]]:
    """The model is the file that was named; what goes with it has the name that the model knows it by."""
    for number, stored in enumerate(manifest.files):
        yield (model.with_name(stored.name) if number else model), stored


def _manifest(model: Path, key: "Ed25519PublicKey | None") -> Verified:
    """What is said of a model, its signature verified before it is read any further if there is a key."""
    if not model.is_file():
        raise InputError(f"no file {model}", "a model is named by its file", "runs/NAME/export/model.onnx, say")
    file = beside(model, MANIFEST)
    if not file.exists():
        raise _refused(f"{model} has no manifest", f"there is no {file}")
    with _open(file) as opened:
        content = opened.read(_LARGEST_MANIFEST + 1)
    signature = _signature(beside(model, SIGNATURE))
    if key is not None and signature is None:
        raise _refused(f"{model} is not signed", "a key was given, and only what it has signed is taken")
    if key is not None and signature is not None:
        _check_signature(model, key, signature, content)
    if len(content) > _LARGEST_MANIFEST:
        raise _refused(f"{file} cannot be read", f"it has more than {_LARGEST_MANIFEST:,} bytes")
    try:
        manifest = parse(content)
    except ValueError as error:
        raise _refused(f"{file} cannot be read", str(error)) from None
    if bool(manifest.signer) != (signature is not None):
        missing = "its signature is gone" if signature is None else "the signature is not this model's"
        raise _refused(f"{model} was changed", missing)
    if signature is not None:
        _check_signer(model, manifest, key, signature, content)
    return Verified(manifest, trusted=key is not None)


def _signature(file: Path) -> bytes | None:
    if not file.exists():
        return None
    with _open(file) as opened:
        return opened.read(_SIGNATURE_BYTES + 1)


def _check_signer(
    model: Path, manifest: Manifest, key: "Ed25519PublicKey | None", signature: bytes, content: bytes
) -> None:
    """The manifest names who has signed it: that is the key, or without one, at least has signed this."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    signer = bytes.fromhex(manifest.signer)
    if key is None:
        _check_signature(model, Ed25519PublicKey.from_public_bytes(signer), signature, content)
    elif key.public_bytes_raw() != signer:
        raise _refused(f"{model} was changed", "its manifest names another signer than the key")


def _check_signature(model: Path, key: "Ed25519PublicKey", signature: bytes, content: bytes) -> None:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, content)
    except InvalidSignature:
        name = key.public_bytes_raw().hex()
        cause = f"its manifest or signature was changed, or it was signed by another key than {name}"
        raise _refused(f"{model} has no valid signature", cause) from None


def _open(file: Path) -> BinaryIO:
    try:
        if not file.is_file():
            raise OSError(errno.EINVAL, "it is no file")
        return file.open("rb")
    except OSError as error:
        fix = "see that the files lie together, and that you may read them"
        raise InputError(f"cannot read {file}", error.strerror or str(error), fix) from None


def _refused(what: str, cause: str) -> UnverifiedModel:
    return UnverifiedModel(what, cause, "fetch it again from where it comes from, or export it anew")


def refuse_existing(out: Path, replace: bool) -> None:
    """What stands where a model is to be written is replaced only when asked, and what is no file never.

    Root would put a file in the place of a device.

    Raises:
        InputError: so.
    """
    there = [
        file for file in (out, *(beside(out, one) for one in (DATA, MANIFEST, SIGNATURE))) if os.path.lexists(file)
    ]
    if out.exists() and not out.is_file():
        raise InputError(f"{out} is there already", "it is no file, but a folder or a device", "--out FILE")
    if there and not replace:
        fix = "--force, or another name: --out FILE"
        raise InputError(f"{there[0]} is there already", "it is not written over unasked", fix)


@contextmanager
def workspace(out: Path, replace: bool = False) -> Iterator[Path]:
    """A folder beside `out`, for its owner alone, to make a model in; it is gone afterwards.

    What a killed export left there is removed first.

    Args:
        replace: an earlier model of that name.

    Raises:
        InputError: there is something of that name, the folder cannot be written, or another process exports there.
        HotloopError: what was done there could not be written.
    """
    refuse_existing(out, replace)
    folder = out.with_name(f".{out.name}.unfinished")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _cannot_write(out, error, InputError) from None
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        if not lock_at_once(descriptor):
            raise InputError(f"{out} is in use", "another process exports it", "wait for it, or --out FILE")
        try:
            for left in folder.iterdir():
                left.unlink()
            yield folder
        except OSError as error:
            raise _cannot_write(out, error, HotloopError) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(
    folder: Path, out: Path, describe: Callable[[tuple[StoredFile, ...]], Manifest],
    sign: "Ed25519PrivateKey | None" = None, secret: bytes | None = None,
) -> Manifest:  # fmt: skip
    """Bring a model from its workspace into place: the manifest after the model, the signature last.

    An earlier one of that name is void from the first moment on: at no time do parts of two verify together.

    Args:
        describe: says what there is to say, given the files as they are published.
        sign: signs that.
        secret: encrypts the files; 32 bytes.
    """
    made = [file for file in (folder / out.name, beside(folder / out.name, DATA)) if file.exists()]
    if secret is not None:
        for file in made:
            _encrypt(file, secret)
    manifest = describe(tuple(_stored(file) for file in made))
    content = manifest.to_bytes()
    for suffix in (SIGNATURE, MANIFEST, DATA):
        beside(out, suffix).unlink(missing_ok=True)
    for file in made:
        file.replace(out.with_name(file.name))
    write_atomic(beside(out, MANIFEST), content)
    if sign is not None:
        write_atomic(beside(out, SIGNATURE), sign.sign(content))
    fsync_directory(out.parent)
    return manifest


def _encrypt(file: Path, secret: bytes) -> None:
    from hotloop.export.encryption import encrypted

    sealed = beside(file, ".sealed")
    with file.open("rb") as plain, sealed.open("wb") as target:
        for piece in encrypted(plain, secret, os.urandom(32)):
            target.write(piece)
    sealed.replace(file)


def _stored(file: Path) -> StoredFile:
    """On the disk for good, with its hash."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return StoredFile(file.name, os.fstat(opened.fileno()).st_size, digest)


def _cannot_write(out: Path, error: OSError, kind: type[HotloopError]) -> HotloopError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = FIXES[error.errno] if full and error.errno else "choose another place: --out FILE"
    return kind(f"cannot write {out}", error.strerror or str(error), fix)
