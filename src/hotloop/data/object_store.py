"""Object storage: S3 and what speaks its protocol, and others, opened with the credentials of the environment."""

import os
import re
from datetime import timedelta
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from hotloop.core.errors import InputError

SCHEMES = ("s3", "gs", "az")
_CONNECT_SECONDS, _ANSWER_SECONDS, _RETRY_SECONDS = 5, 30, 60


def is_remote(location: str) -> bool:
    """Whether a location is in object storage."""
    scheme, separator, _ = location.partition("://")
    return bool(separator) and scheme in SCHEMES


@lru_cache(maxsize=16)
def open_store(url: str, retries: int = 8, patience: int = 1, **settings: str) -> Any:
    """A place, opened once a process: processes of ours are spawned, never forked, which its threads would not survive.

    Args:
        retries: of a request, for a minute at most. A store that is down refuses at once: 8 of them take a few seconds.
        patience: so many times as long as usual a request may take, and its retries.
        settings: of that kind of store, as obstore calls them.

    Raises:
        InputError: obstore is not installed, or there is no such kind of place.
    """
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=patience * _RETRY_SECONDS)}
    client = {
        "connect_timeout": f"{_CONNECT_SECONDS}s",
        "timeout": f"{patience * _ANSWER_SECONDS}s",
        "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
    }
    try:
        # Quoted: a store would take # and ? for the end of the path.
        scheme, _, path = url.partition("://")
        return obstore_module().store.from_url(
            f"{scheme}://{quote(path)}", client_options=client, retry_config=retry, **settings
        )
    except (obstore_module().exceptions.BaseError, ValueError) as error:
        raise refused(url, error) from None


def obstore_module() -> Any:
    """The library, with the parts of it that we use.

    Raises:
        InputError: it is not installed.
    """
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        what = "object storage is read by obstore"
        raise InputError(what, "it is not installed", "pip install 'hotloop[s3]'") from None
    return obstore


def refused(url: str, error: Exception) -> InputError:
    """Words for a store that does not let us read."""
    said = reason(error)
    if "NoSuchBucket" in said:
        fix = "see how the bucket is spelt, and that AWS_REGION and AWS_ENDPOINT_URL are of the store that has it"
    elif not url.startswith("s3://"):
        fix = "see that the machine's credentials for that store are those that may read it"
    else:
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        fix = "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; AWS_ENDPOINT_URL for a store of your own"
        fix += ", and AWS_ALLOW_HTTP=true if it has no TLS" if plain else ""
    return InputError(f"{url} cannot be read", said, fix)


def reason(error: Exception) -> str:
    """What a store says, in a line: the code and the message of its answer, if it gave one."""
    text = " ".join(str(error).split())
    found = [match[1] for tag in ("Code", "Message") if (match := re.search(f"<{tag}>([^<]*)</{tag}>", text))]
    return ": ".join(found) or text.partition(" Debug source:")[0][:300] or type(error).__name__
