"""An exported model's files: nobody changes a byte of them unnoticed, and no half of one verifies."""

import errno
import hashlib
import io
import json
import os
import resource
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from exported import onnx_bytes, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.core.errors import HotloopError, InputError
from hotloop.export import artefact
from hotloop.export.artefact import DATA, MANIFEST, SIGNATURE, UnverifiedModel, beside, load, publish, verify, workspace
from hotloop.export.encryption import CHUNK, MAGIC, NotOpened, decrypted, encrypted
from hotloop.export.keys import make_pair, make_secret, read_private, read_public, read_secret
from hotloop.export.manifest import parse

SIGN = Ed25519PrivateKey.from_private_bytes(b"s" * 32)
KEY = SIGN.public_key()
SECRET, SALT = b"e" * 32, b"n" * 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.onnx", SIGN)


def test_what_was_exported_is_verified_and_given(model: Path) -> None:
    assert verify(model, KEY).trusted
    assert not verify(model).trusted
    verified, contents = load(model, KEY)
    assert contents == [onnx_bytes()]
    assert verified.manifest.signer == KEY.public_bytes_raw().hex()
    assert sorted(os.listdir(model.parent)) == ["model.onnx", "model.onnx.manifest.json", "model.onnx.manifest.sig"]


@pytest.mark.parametrize("key", [KEY, None])
def test_a_thousand_changed_bytes_are_refused(model: Path, key: object) -> None:
    random = np.random.default_rng(0)
    files = [model, beside(model, MANIFEST), beside(model, SIGNATURE)]
    contents = [file.read_bytes() for file in files]
    for number in range(1000):
        file, content = files[number % 3], contents[number % 3]
        place, change = int(random.integers(len(content))), int(random.integers(1, 256))
        file.write_bytes(content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])
        with pytest.raises(UnverifiedModel):
            load(model, key)  # type: ignore[arg-type]
        file.write_bytes(content)
    assert verify(model, KEY).trusted


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "another's"])
@pytest.mark.parametrize("suffix", ["", MANIFEST, SIGNATURE])
def test_parts_that_do_not_go_together_are_refused(model: Path, suffix: str, change: str, tmp_path: Path) -> None:
    file = beside(model, suffix)
    content = file.read_bytes()
    other = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
    (tmp_path / "o").mkdir()
    of_another = beside(write_model(tmp_path / "o" / "model.onnx", other, classes=("a", "b")), suffix)
    (tmp_path / "o" / "model.onnx").write_bytes(onnx_bytes() + b"\0")
    file.write_bytes({"cut": content[:-1], "longer": content + b"\0"}.get(change, of_another.read_bytes()))
    if change == "gone":
        file.unlink()
    for key in (KEY, None):
        with pytest.raises(InputError if change == "gone" and not suffix else UnverifiedModel):
            verify(model, key)


def test_who_has_signed_it_matters(model: Path, tmp_path: Path) -> None:
    other = Ed25519PrivateKey.from_private_bytes(b"o" * 32).public_key()
    with pytest.raises(UnverifiedModel, match="signed by another key than") as caught:
        verify(model, other)
    assert caught.value.exit_code == 1
    unsigned = write_model(tmp_path / "unsigned.onnx")
    assert not verify(unsigned).trusted
    with pytest.raises(UnverifiedModel, match="is not signed"):
        verify(unsigned, KEY)
    beside(unsigned, SIGNATURE).write_bytes(SIGN.sign(beside(unsigned, MANIFEST).read_bytes()))
    for key in (KEY, None):  # a manifest that says it is unsigned is not taken for signed
        with pytest.raises(UnverifiedModel):
            verify(unsigned, key)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\x80", b"[" * 100_000, b'{"format": 2}', b"0" * 2**24 + b"1"])
def test_a_manifest_that_is_none_is_refused_in_three_lines(tmp_path: Path, content: bytes) -> None:
    model = write_model(tmp_path / "model.onnx")
    beside(model, MANIFEST).write_bytes(content)
    with pytest.raises(UnverifiedModel) as caught:
        verify(model)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a\0b", ""])
def test_a_manifest_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "in" / "model.onnx")
    (tmp_path / "secret").write_bytes(b"x")
    said = parse(beside(model, MANIFEST).read_bytes())
    stored = {"name": name, "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    raw = json.loads(said.to_bytes())
    beside(model, MANIFEST).write_text(json.dumps({**raw, "files": [*raw["files"], stored]}))
    with pytest.raises(HotloopError):
        verify(model)


def test_weights_in_a_file_of_their_own_are_verified_too(tmp_path: Path) -> None:
    out = tmp_path / "large.onnx"
    like = parse(beside(write_model(tmp_path / "model.onnx"), MANIFEST).read_bytes())
    with workspace(out) as folder:
        (folder / out.name).write_bytes(b"program")
        beside(folder / out.name, DATA).write_bytes(b"weights")
        publish(folder, out, lambda files: type(like)(**{**vars(like), "files": files}), secret=SECRET)
    assert beside(out, DATA).read_bytes() != b"weights"
    beside(out, DATA).write_bytes(beside(out, DATA).read_bytes()[:-1] + b"?")
    with pytest.raises(UnverifiedModel, match=r"large.onnx.data was changed"):
        verify(out)


def test_an_encrypted_model_opens_with_its_secret_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx.enc", SIGN, SECRET)
    assert onnx_bytes()[:20] not in model.read_bytes()
    assert verify(model, KEY).trusted, "nobody needs the secret to verify it"
    before = sorted(os.listdir(tmp_path))
    assert load(model, KEY, SECRET)[1] == [onnx_bytes()]
    assert sorted(os.listdir(tmp_path)) == before
    for secret, words in ((None, "is encrypted"), (b"x" * 32, "does not open")):
        with pytest.raises(InputError, match=words):
            load(model, KEY, secret)


@settings(max_examples=20)
@given(st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7]), st.randoms())
def test_what_is_encrypted_comes_back_and_nothing_else_does(size: int, random: object) -> None:
    plain = np.random.default_rng(size).bytes(size)
    sealed = b"".join(encrypted(io.BytesIO(plain), SECRET, SALT))
    assert b"".join(decrypted(io.BytesIO(sealed), SECRET)) == plain
    start, step = len(MAGIC) + 32, CHUNK + 16
    chunks = [sealed[place : place + step] for place in range(start, len(sealed), step)]
    place = random.randrange(len(sealed))  # type: ignore[attr-defined]
    changed = [
        sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :],
        sealed[:place],
        sealed + b"\0",
        sealed[:start] + b"".join(chunks[:-1]),
        sealed + chunks[-1],
        b"".join([sealed[:start], *chunks[1:], chunks[0]]) if len(chunks) > 1 else b"",
    ]
    for other in changed:
        with pytest.raises(NotOpened):
            list(decrypted(io.BytesIO(other), SECRET))
    with pytest.raises(NotOpened):
        list(decrypted(io.BytesIO(sealed), b"x" * 32))


def test_keys_are_made_for_their_owner_and_never_written_over(tmp_path: Path) -> None:
    public, name = make_pair(tmp_path / "release.key")
    assert read_private(tmp_path / "release.key").public_key() == read_public(public)
    assert read_public(public).public_bytes_raw().hex() == name
    make_secret(tmp_path / "secret")
    assert len(read_secret(str(tmp_path / "secret"))) == 32
    modes = [stat.S_IMODE((tmp_path / one).stat().st_mode) for one in ("release.key", "secret")]
    assert modes == [0o600, 0o600]
    for again in (lambda: make_pair(tmp_path / "release.key"), lambda: make_secret(tmp_path / "secret")):
        with pytest.raises(InputError, match="is there already"):
            again()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError):
        make_secret(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(InputError, match="cannot write"):
        make_pair(tmp_path / "absent" / "release.key")


def _odd_keys() -> Iterator[tuple[str, bytes, str, str]]:
    """What a file may hold in place of a key, and what is said of it: as a private one, as a public one."""
    none, subject = NoEncryption(), PublicFormat.SubjectPublicKeyInfo
    private, pem = SIGN.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, none), Encoding.PEM
    rsa = generate_private_key(65537, 2048)
    yield "empty", b"", "no private key", "is not one in PEM"
    yield "garbage", b"\xff" * 100, "no private key", "is not one in PEM"
    yield "cut", private[:60], "no private key", "is a private key"
    yield "huge", b"-" * 2**17, "more than 65,536 bytes", "more than 65,536 bytes"
    yield "private", private, "", "is a private key"
    yield "public", KEY.public_bytes(pem, subject), "is a public key", ""
    yield "rsa", rsa.private_bytes(pem, PrivateFormat.PKCS8, none), "another kind", "is a private key"
    yield "rsa public", rsa.public_key().public_bytes(pem, subject), "is a public key", "another kind"
    protected = SIGN.private_bytes(pem, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    yield "protected", protected, "a password", "is a private key"


def test_a_wrong_key_is_told_and_never_shown(tmp_path: Path) -> None:
    for name, content, as_private, as_public in _odd_keys():
        (tmp_path / name).write_bytes(content)
        for read, words in ((read_private, as_private), (read_public, as_public)):
            if words:
                with pytest.raises(InputError, match=words) as caught:
                    read(tmp_path / name)  # type: ignore[operator]
                assert "BEGIN" not in str(caught.value)
            else:
                read(tmp_path / name)  # type: ignore[operator]
    with pytest.raises(InputError, match="cannot read"):
        read_public(tmp_path)


@pytest.mark.parametrize("text", ["", "abc", "0" * 63, "0" * 66, "g" * 64])
def test_a_secret_that_is_none_is_told_and_never_shown(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(text)
    monkeypatch.setenv("MODEL_SECRET", text)
    for place in (str(tmp_path / "secret"), "env:MODEL_SECRET", "env:MODEL_SECRET_ABSENT"):
        with pytest.raises(InputError) as caught:
            read_secret(place)
        assert not text or text not in str(caught.value).replace(place, "")
    monkeypatch.setenv("MODEL_SECRET", f" {'0a' * 32}\n")
    assert read_secret("env:MODEL_SECRET") == b"\n" * 32


def test_nothing_is_written_over_unasked(model: Path) -> None:
    before = {file: file.read_bytes() for file in model.parent.iterdir()}
    with pytest.raises(InputError, match=r"is there already[\s\S]*--force"), workspace(model):
        pass
    assert {file: file.read_bytes() for file in model.parent.iterdir()} == before
    (model.parent / "folder.onnx").mkdir()
    os.mkfifo(model.parent / "pipe.onnx")
    for name in ("folder.onnx", "pipe.onnx"):
        with pytest.raises(InputError, match="is there already"), workspace(model.parent / name, replace=True):
            pass
    assert (model.parent / "pipe.onnx").is_fifo()


def test_two_exports_do_not_meet_and_what_a_killed_one_left_goes(tmp_path: Path) -> None:
    out = tmp_path / "model.onnx"
    left = tmp_path / ".model.onnx.unfinished"
    left.mkdir()
    (left / "model.onnx").write_bytes(b"half")
    with workspace(out) as folder:
        assert list(folder.iterdir()) == []
        with pytest.raises(InputError, match="is in use"), workspace(out):
            pass
        assert folder.is_dir()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("moment", range(4))
def test_no_half_of_a_new_model_verifies(model: Path, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut between any two of the moves that bring it into place, an older one being there."""
    done = 0

    def stops(function: object, *arguments: object) -> object:
        nonlocal done
        done += 1
        if done > moment:
            raise KeyboardInterrupt
        return function(*arguments)  # type: ignore[operator]

    replace, write = Path.replace, artefact.write_atomic
    monkeypatch.setattr(Path, "replace", lambda *given: stops(replace, *given))
    monkeypatch.setattr(artefact, "write_atomic", lambda *given: stops(write, *given))
    with pytest.raises(KeyboardInterrupt):
        write_model(model, SIGN, SECRET, classes=("new", "newer"))
    monkeypatch.undo()
    assert not (model.parent / ".model.onnx.unfinished").exists()
    try:
        assert verify(model, KEY).manifest.classes == ("class0", "class1"), "the older one, whole"
        assert moment == 0
    except (UnverifiedModel, InputError):
        assert moment > 0


def test_a_full_disk_leaves_no_model(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk's end."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(HotloopError, match="cannot write") as caught:
            write_model(tmp_path / "model.onnx", SIGN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.exit_code == 1
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(HotloopError, match=r"No space left[\s\S]*free some space") as caught, workspace(tmp_path / "m"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.exit_code == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write[\s\S]*--out"), workspace(tmp_path / "file" / "model.onnx"):
        pass
