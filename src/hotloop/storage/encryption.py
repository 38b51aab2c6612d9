"""Encryption by the store: asked for with every object that is written, and believed once its answer names the key."""

import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hotloop.core.errors import CheckpointError, InputError
from hotloop.core.job import StorageSection
from hotloop.data.object_store import obstore_module
from hotloop.storage.transport import tls_context

_NAMES = {"aes256": "AES256", "kms": "aws:kms"}
"""As S3 calls them in `x-amz-server-side-encryption`."""
_HEADER, _KEY_HEADER = "x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id"
_SECONDS = 30
_WAITS = (0.5, 2, 8)
"""Seconds before a store is asked again."""
_ELSEWHERE = {
    "gs": "give the bucket that key (gcloud storage buckets update gs://BUCKET --default-encryption-key=KEY)",
    "az": "give the container a scope with that key (az storage container create --default-encryption-scope SCOPE)",
}


class NotEncrypted(CheckpointError):
    """A store has not encrypted an object as it was asked to."""


@dataclass(frozen=True)
class Encryption:
    """What is asked of a store.

    Attributes:
        kind: as S3 calls it; empty: nothing is asked for.
        key: that it names; empty: any.
        tls: oldest version for questions of our own.
    """

    kind: str = ""
    key: str = ""
    tls: str = "1.3"

    @property
    def settings(self) -> dict[str, str]:
        """Of a store, as obstore calls them: what is written by it asks for encryption."""
        asked = {"server_side_encryption": self.kind, "sse_kms_key_id": self.key}
        return {name: value for name, value in asked.items() if value}

    def verify(self, store: Any, url: str, name: str) -> None:
        """Read an object's headers: one request, by an address that is signed for a minute and goes nowhere else.

        Raises:
            NotEncrypted: they do not name what was asked for, or the store refuses to show them.
            OSError: the store does not answer.
        """
        if not self.kind:
            return
        kind, key = _headers(obstore_module().sign(store, "HEAD", name, timedelta(seconds=60)), self.tls)
        asked = f"{self.kind} with {self.key}" if self.key else self.kind
        if kind != self.kind or not is_key(self.key, key):
            found = f"{kind} with {key}" if key else kind or "nothing of it"
            raise NotEncrypted(
                f"{url}/{name} is not encrypted with {asked}", f"the store's answer names {found}",
                "let the store encrypt with that key (policy of the bucket, rights to the key); hotloop storage check",
            )  # fmt: skip


def encryption(storage: StorageSection, url: str) -> Encryption:
    """What a job asks of the store that it writes to.

    Raises:
        InputError: that store cannot be asked for it, or its answer could not be held against it.
    """
    kind = "kms" if storage.kms_key and storage.encryption == "store" else storage.encryption
    if kind == "store":
        return Encryption(tls=storage.tls)
    scheme = url.partition("://")[0]
    if scheme != "s3":
        asked = "storage.kms_key" if storage.kms_key else "storage.encryption"
        cause = "obstore can ask only S3 for it, and no answer of this store would tell what came of it"
        unset = "--set storage.encryption=store" + (' --set storage.kms_key=""' if storage.kms_key else "")
        raise InputError(f"{asked} does not go with {url}", cause, f"{unset}; {_ELSEWHERE[scheme]}")
    if storage.kms_key and kind != "kms":
        fix = "--set storage.encryption=kms"
        raise InputError("storage.kms_key without kms", f'encryption is "{storage.encryption}"', fix)
    if "alias/" in storage.kms_key:
        fix = "name the key: aws kms describe-key --key-id ALIAS --query KeyMetadata.Arn"
        raise InputError(f"storage.kms_key = {storage.kms_key}", "S3's answers name keys, not their aliases", fix)
    return Encryption(_NAMES[kind], storage.kms_key, storage.tls)


def is_key(asked: str, answered: str) -> bool:
    """Whether an answer names the key that was asked for: S3 answers with its ARN, whichever way it was named."""
    return not asked or answered == asked or answered.endswith(f":key/{asked}")


class _Here(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A signed address is for the store alone."""


def _headers(signed: str, tls: str) -> tuple[str, str]:
    """The two headers; asked for again while the store has no time for it.

    Raises:
        NotEncrypted: the store refuses to say.
        OSError: it does not answer; the text has no address, which would be a right to read.
    """
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=tls_context(tls)), _Here)
    for wait in (*_WAITS, None):
        try:
            with opener.open(urllib.request.Request(signed, method="HEAD"), timeout=_SECONDS) as answer:  # noqa: S310
                return answer.headers.get(_HEADER, ""), answer.headers.get(_KEY_HEADER, "")
        except urllib.error.HTTPError as error:
            cause = f"{error.code} {error.reason}"
            if error.code < 500:
                fix = "see that the credentials may read what they write (s3:GetObject)"
                raise NotEncrypted("it cannot be seen how an object was encrypted", cause, fix) from None
        except (OSError, http.client.HTTPException) as error:
            cause = str(error) or type(error).__name__
        if wait is None:
            break
        time.sleep(wait)
    raise OSError(f"the store does not say how an object was encrypted: {cause}")
