"""What a job does in object storage, tried with the credentials that are here; and that nothing else is allowed."""

import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotloop.core.errors import HotloopError
from hotloop.core.job import Job
from hotloop.core.units import count
from hotloop.data.object_store import obstore_module, open_store, reason, refused
from hotloop.storage.client_key import ClientKey
from hotloop.storage.encryption import Encryption, encryption
from hotloop.storage.places import Place, find_places
from hotloop.storage.transport import endpoint, reach

State = Literal["ok", "warning", "error"]
_BYTES = 16
_FIXES = {
    "AccessDenied": "grant it: hotloop storage policy JOB",
    "NoSuchBucket": "make the bucket, or name one that is there",
    "NoSuchKey": "put the data there, or name what is there",
    "InvalidRange": "put the data there again: this object is empty",
    "ExpiredToken": "take new credentials: AWS_SESSION_TOKEN and those with it have run out",
}
"""By what S3 calls it."""
_MORE = "take it away: hotloop storage policy JOB says what is needed"


@dataclass(frozen=True)
class Finding:
    """What came of trying one thing.

    Attributes:
        place: where.
        tried: what was done.
        text: what came of it.
        fix: what to type or change; empty if it is well.
    """

    place: str
    tried: str
    state: State
    text: str
    fix: str = ""


class _Failed(Exception):
    """Something that has to work does not; what would follow at that place is not tried."""


def check_storage(job: Job) -> list[Finding]:
    """Try all that a job does, place by place, and what it does not do.

    What is written is a few bytes under a name of its own, which are removed again. Nothing of anybody else is changed.

    Raises:
        InputError: obstore is not installed, or a place is none.
    """
    places = find_places(job)
    findings = []
    for place in places:
        tries = _Tries(job, place, below=any(_is_below(place, other) for other in places))
        with suppress(_Failed):
            tries.run()
        findings += tries.findings
    return findings


def _is_below(place: Place, other: Place) -> bool:
    same = (place.provider, place.bucket) == (other.provider, other.bucket)
    return same and other.writes and not place.writes and place.prefix.startswith(other.prefix)


class _Tries:
    """Everything that is tried at one place."""

    def __init__(self, job: Job, place: Place, below: bool) -> None:
        self.findings: list[Finding] = []
        self._job, self._place, self._below = job, place, below
        self._obstore = obstore_module()
        self._errors = (self._obstore.exceptions.BaseError, OSError)
        at = place.url.partition("://")[2].partition("/")[2].strip("/")
        self._inside = place.prefix.removeprefix(f"{at}/") if at else place.prefix
        """The place's prefix, seen from its store."""

    def run(self) -> None:
        self._reach()
        if self._place.writes:
            self._checkpoints()
        else:
            self._data()

    def _say(self, tried: str, state: State, text: str, fix: str = "") -> None:
        self.findings.append(Finding(self._place.key, tried, state, text, fix))

    def _must(self, tried: str, work: Callable[[], str]) -> None:
        try:
            self._say(tried, "ok", work())
        except HotloopError as error:
            self._say(tried, "error", f"{error.what}: {error.cause}", error.fix)
            raise _Failed from None
        except self._errors as error:
            self._say(tried, "error", reason(error), self._fix(error))
            raise _Failed from None

    def _fix(self, error: Exception) -> str:
        known = next((fix for code, fix in _FIXES.items() if code in str(error)), "")
        granted = self._place.provider != "aws" and _is_refusal(error)
        return known or (_FIXES["AccessDenied"] if granted else refused(self._place.url, error).fix)

    def _reach(self) -> None:
        address = ""

        def work() -> str:
            nonlocal address
            address = endpoint(self._place)
            return reach(self._place, address, self._job.storage.tls)

        self._must("reach it", work)
        found = self.findings.pop().text
        if found == "http":
            self._say("reach it", "warning", f"{address} has no TLS, which AWS_ALLOW_HTTP allows", "name https://")
        else:
            self._say("reach it", "ok", f"{address} by {found.replace('TLSv', 'TLS ')}")

    def _data(self) -> None:
        store, names = open_store(self._place.url), self._place.names
        listed: list[Any] = []
        if not names:
            self._must("list", lambda: f"{count(len(self._listed(store, listed)), 'name')} in the first answer")
        folder = self._place.prefix.rpartition("/")[0]
        full = (one["path"] for one in listed if one["size"])  # an empty object marks a folder
        readable = names[0].removeprefix(f"{folder}/") if names else next(full, "")
        if readable:
            self._must("read", lambda: f"{len(self._obstore.get_range(store, readable, start=0, length=_BYTES))} bytes")
        else:
            self._say("read", "error", "nothing lies there", "put the data there, or name another place")
        if self._below:
            self._say("not write", "warning", "it lies below checkpoint.copy_to, where the job writes", "part the two")
        else:
            asked = {} if self._place.provider != "aws" else encryption(self._job.storage, self._place.url).settings
            self._not_written("not write", asked, _probe(), "credentials may write below the data")
        self._lists_no_more()

    def _listed(self, store: Any, found: list[Any]) -> list[Any]:
        found += next(iter(self._obstore.list(store, chunk_size=1000)), [])
        return found

    def _checkpoints(self) -> None:
        asked = Encryption()

        def may_be_asked() -> str:
            nonlocal asked
            asked = encryption(self._job.storage, self._place.url)
            return f"{asked.kind} {asked.key}".strip() or "as the bucket does it"

        self._must("ask for encryption", may_be_asked)
        store = open_store(self._place.url, **asked.settings)
        name = f"{self._inside}{_probe()}"
        content = b"hotloop storage check"
        inside = self._inside.rstrip("/")
        self._must("list", lambda: count(len(next(iter(self._obstore.list(store, prefix=inside)), [])), "name"))
        self._must("write", lambda: str(self._obstore.put(store, name, content) and f"{len(content)} bytes"))
        try:
            self._must("read back", lambda: self._same(store, name, content))
            if asked.kind:
                self._must("encrypted", lambda: self._verified(asked, store, name))
        finally:
            self._must("remove", lambda: str(self._obstore.delete(store, name) or "done"))
        if asked.key:
            name, allowed = f"{self._inside}{_probe()}", "the store takes objects that do not name the key"
            self._not_written("not write without the key", {}, name, allowed)
        if self._job.storage.client_key:
            self._must("client key", lambda: _round_trip(ClientKey(self._job.storage.client_key)))
        self._lists_no_more()

    def _same(self, store: Any, name: str, content: bytes) -> str:
        found = bytes(self._obstore.get(store, name).bytes())
        if found != content:
            raise HotloopError(f"{name} is not what was written", f"{len(found)} bytes came back", "look at the store")
        return "the same"

    def _verified(self, asked: Encryption, store: Any, name: str) -> str:
        asked.verify(store, self._place.url, name)
        return f"the answer names {asked.key or asked.kind}"

    def _not_written(self, tried: str, settings: dict[str, str], name: str, otherwise: str) -> None:
        store = open_store(self._place.url, **settings)
        if self._is_refused(tried, lambda: self._obstore.put(store, name, b"hotloop storage check"), otherwise):
            return
        try:
            self._obstore.delete(store, name)
        except self._errors as error:
            left = f"{self._place.url}/{name} was written and cannot be removed: {reason(error)}"
            self._say(tried, "warning", left, "remove it with other credentials")

    def _lists_no_more(self) -> None:
        bucket = f"{self._place.url.partition('://')[0]}://{self._place.bucket}"

        def work() -> object:
            return next(iter(self._obstore.list(open_store(bucket), chunk_size=1)), [])

        if self._place.prefix:
            self._is_refused("not list the bucket", work, "credentials may list all of the bucket")

    def _is_refused(self, tried: str, work: Callable[[], Any], otherwise: str) -> bool:
        """A refusal is well; a store that does what it should not is said to allow more than the job uses."""
        try:
            work()
        except self._errors as error:
            if _is_refusal(error):
                self._say(tried, "ok", "refused, as it should be")
            else:
                self._say(tried, "warning", f"cannot be told: {reason(error)}", "hotloop storage check, once more")
            return True
        self._say(tried, "warning", f"{otherwise}: more rights than the job uses", _MORE)
        return False


def _is_refusal(error: Exception) -> bool:
    """403; of a list obstore has no class of its own for it."""
    return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or "403 Forbidden" in str(error)


def _probe() -> str:
    return f".hotloop-check-{uuid.uuid4().hex}"


def _round_trip(key: ClientKey) -> str:
    with tempfile.TemporaryDirectory() as name:
        plain, encrypted, back = (Path(name, each) for each in ("plain", "encrypted", "back"))
        plain.write_bytes(b"hotloop storage check")
        key.encrypt(plain, encrypted)
        key.decrypt(encrypted, back)
        same = back.read_bytes() == plain.read_bytes()
    return "encrypts and decrypts" if same else "does not decrypt what it encrypts"
