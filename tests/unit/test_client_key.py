"""Encryption before anything leaves: what was changed, cut short or encrypted for somebody else is never accepted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as some

pytest.importorskip("pyrage", reason="pip install 'hotloop[s3]'")

import pyrage

from hotloop.core.errors import InputError
from hotloop.storage.client_key import ClientKey, Damaged, WrongKey, make_key


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "key"
    make_key(file)
    return file


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 200_000])
def test_what_was_encrypted_comes_back(key_file: Path, tmp_path: Path, size: int) -> None:
    key = ClientKey(f"file:{key_file}")
    content = os.urandom(size)
    (tmp_path / "plain").write_bytes(content)
    key.encrypt(tmp_path / "plain", tmp_path / "encrypted")
    key.decrypt(tmp_path / "encrypted", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    encrypted = (tmp_path / "encrypted").read_bytes()
    assert encrypted.startswith(b"age-encryption.org/v1\n")
    assert size < 100 or content[:100] not in encrypted
    identity = pyrage.x25519.Identity.from_str(key_file.read_text().strip())
    assert pyrage.decrypt(encrypted, [identity]) == content, "any program that reads age reads it"


@pytest.fixture(scope="module")
def encrypted(key_file: Path) -> bytes:
    identity = pyrage.x25519.Identity.from_str(key_file.read_text().strip())
    found: bytes = pyrage.encrypt(bytes(range(256)) * 300, [identity.to_public()])
    return found


@run(max_examples=80)
@given(some.integers(0, 10**9), some.integers(0, 255), some.booleans())
def test_a_changed_byte_or_a_missing_end_is_never_accepted(
    key_file: Path, encrypted: bytes, tmp_path_factory: pytest.TempPathFactory, at: int, change: int, in_header: bool
) -> None:
    """A change of 0 cuts it short there."""
    at %= 300 if in_header else len(encrypted)
    changed = encrypted[:at] + (bytes([encrypted[at] ^ change]) + encrypted[at + 1 :] if change else b"")
    folder = tmp_path_factory.mktemp("changed")
    (folder / "changed").write_bytes(changed)
    with pytest.raises((Damaged, WrongKey)):
        ClientKey(f"file:{key_file}").decrypt(folder / "changed", folder / "back")


def test_another_key_is_told(key_file: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    (tmp_path / "plain").write_bytes(b"weights")
    ClientKey(f"file:{key_file}").encrypt(tmp_path / "plain", tmp_path / "encrypted")
    with pytest.raises(WrongKey, match="for another key"):
        ClientKey(f"file:{tmp_path / 'other'}").decrypt(tmp_path / "encrypted", tmp_path / "back")
    both = tmp_path / "both"
    both.write_text(f"# newest first\n{(tmp_path / 'other').read_text()}{key_file.read_text()}")
    both.chmod(0o600)
    ClientKey(f"file:{both}").decrypt(tmp_path / "encrypted", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"weights", "an older key still decrypts"


def test_where_a_key_is_not(key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readable = tmp_path / "readable"
    readable.write_text(key_file.read_text())
    readable.chmod(0o644)
    secret = key_file.read_text().strip()
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "damaged").touch(0o600)
    (tmp_path / "damaged").write_text(secret[:-1] + "!")
    monkeypatch.setenv("DAMAGED_KEY", f"{secret[:-3]}AAA")
    for setting, words in (
        (f"file:{readable}", r"others may read .*\n.* mode is 0644\n.*chmod 600"),
        (f"file:{tmp_path}/absent", "No such file"),
        (f"file:{tmp_path}", "cannot read"),
        (f"file:{tmp_path}/empty", "no key of age"),
        (f"file:{tmp_path}/damaged", "no key of age"),
        ("env:NO_SUCH_KEY", "NO_SUCH_KEY is not set"),
        ("env:DAMAGED_KEY", "no key of age in DAMAGED_KEY"),
    ):
        with pytest.raises(InputError, match=words) as refused:
            ClientKey(setting)
        assert secret[20:40] not in repr(refused.value)


def test_a_variable_holds_a_key(key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", key_file.read_text().strip())
    (tmp_path / "plain").write_bytes(b"x")
    ClientKey("env:MY_KEY").encrypt(tmp_path / "plain", tmp_path / "encrypted")
    ClientKey(f"file:{key_file}").decrypt(tmp_path / "encrypted", tmp_path / "back")
    assert os.environ["MY_KEY"][20:40] not in repr(ClientKey("env:MY_KEY").__dict__)


def test_a_new_key_is_its_owners_and_replaces_none(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="is not replaced"):
        make_key(tmp_path / "key")
    with pytest.raises(InputError, match="cannot write"):
        make_key(tmp_path / "no-such-folder" / "key")


def test_memory_is_bounded(key_file: Path, tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from hotloop.storage.client_key import ClientKey
key, folder = ClientKey(f"file:{sys.argv[1]}"), Path(sys.argv[2])
def through(size):
    with (folder / "plain").open("wb") as file:
        file.truncate(size)
    key.encrypt(folder / "plain", folder / "encrypted")
    key.decrypt(folder / "encrypted", folder / "back")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = through(1 << 20)
print(through(64 << 20) - small)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(key_file), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) < 16 << 10, "KiB more, for 63 MiB more"


def test_a_full_disk_is_no_damage(key_file: Path, tmp_path: Path) -> None:
    key = ClientKey(f"file:{key_file}")
    (tmp_path / "plain").write_bytes(bytes(1 << 20))
    key.encrypt(tmp_path / "plain", tmp_path / "encrypted")
    with pytest.raises(OSError, match="No space left") as failed:
        key.decrypt(tmp_path / "encrypted", Path("/dev/full"))
    assert not isinstance(failed.value, Damaged)
    with pytest.raises(OSError, match="No space left"):
        key.encrypt(tmp_path / "plain", Path("/dev/full"))
