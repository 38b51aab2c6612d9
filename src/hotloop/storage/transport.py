"""How a store is reached: encrypted, by a version of TLS that is new enough.

obstore's TLS takes versions 1.2 and 1.3 and cannot be told to leave one out. So a handshake that offers nothing older
than what is asked for goes to the same address first. A store that has answered it speaks that version with obstore
too: both sides take the highest that both have, and TLS 1.3 notices when somebody between them pretends that they have
less (RFC 8446, section 4.1.3).
"""

import base64
import http.client
import os
import ssl
import urllib.request
from datetime import timedelta
from urllib.parse import unquote, urlsplit

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.data.object_store import obstore_module, open_store
from hotloop.storage.places import Place, find_places

_SECONDS = 10
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_NOBODY = {"access_key_id": "nobody", "secret_access_key": "nothing", "skip_signature": False}
_PLAIN = "AWS_ALLOW_HTTP"


def require_storage(job: Job) -> None:
    """Reach every place of a job, before anything is read or written. About 50 ms a store.

    Raises:
        InputError: a store is reached without TLS, speaks too old a version of it, or does not answer.
    """
    for address, place in {endpoint(place): place for place in find_places(job)}.items():
        reach(place, address, job.storage.tls)


def endpoint(place: Place) -> str:
    """The address that obstore would ask, with the settings of the environment; nobody is asked for it."""
    if place.provider == "aws":
        signed = obstore_module().sign(open_store(place.url, **_NOBODY), "GET", "x", timedelta(seconds=1))
        return "{0.scheme}://{0.netloc}".format(urlsplit(signed))
    if place.provider == "gcp":
        return os.environ.get("GOOGLE_BASE_URL") or "https://storage.googleapis.com"
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    address = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")
    if not address and not account:
        what = f"{place.url} is in no storage account"
        raise InputError(what, "AZURE_STORAGE_ACCOUNT_NAME is not set", "export AZURE_STORAGE_ACCOUNT_NAME=ACCOUNT")
    return address or f"https://{account}.blob.core.windows.net"


def reach(place: Place, address: str, oldest: str) -> str:
    """Connect to a store once.

    Returns:
        by what: `TLSv1.3`; or `http`, where AWS_ALLOW_HTTP says that this is wanted.

    Raises:
        InputError: see `require_storage`.
    """
    if urlsplit(address).scheme == "http":
        if os.environ.get(_PLAIN, "").lower() in ("1", "true"):
            return "http"
        what, cause = f"{place.key}: {address} has no TLS", "what is sent there could be read and changed on the way"
        raise InputError(what, cause, f"name an https:// address; or {_PLAIN}=true for a store of your own")
    try:
        return _handshake(address, oldest)
    except ssl.SSLCertVerificationError as error:
        fix = "SSL_CERT_FILE=ca.pem names the authority of a store of your own"
        raise InputError(f"{place.key}: {address} is not to be trusted", error.verify_message, fix) from None
    except ssl.SSLError as error:
        what = f"{place.key}: {address} does not speak TLS {oldest}"
        fix = "have it enabled there" + ("; or --set storage.tls=1.2" if oldest == "1.3" else "")
        raise InputError(what, f"handshake: {error.reason or error}", fix) from None
    except (OSError, http.client.HTTPException) as error:
        fix = "see that AWS_ENDPOINT_URL, AWS_REGION and the network are right"
        fix = fix if place.provider == "aws" else "see that the network lets it through"
        raise InputError(f"{place.key}: {address} does not answer", str(error) or type(error).__name__, fix) from None


def tls_context(oldest: str) -> ssl.SSLContext:
    """For Python's own connections: certificates are verified, by the system's authorities or SSL_CERT_FILE."""
    context = ssl.create_default_context()
    context.minimum_version = _VERSIONS[oldest]
    return context


def _handshake(address: str, oldest: str) -> str:
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or 443
    proxy = urllib.request.getproxies().get("https")
    if proxy and not urllib.request.proxy_bypass(host):
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        connection = http.client.HTTPSConnection(
            through.hostname or "", through.port or 80, timeout=_SECONDS, context=tls_context(oldest)
        )
        name = f"{unquote(through.username or '')}:{unquote(through.password or '')}"
        told = {"Proxy-Authorization": f"Basic {base64.b64encode(name.encode()).decode()}"} if through.username else {}
        connection.set_tunnel(host, port, told)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=tls_context(oldest))
    try:
        connection.connect()
        return str(connection.sock.version())
    finally:
        connection.close()
