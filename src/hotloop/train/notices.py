"""Notice that this machine is about to be taken away: from its cloud's metadata service, or by a file.

What is asked, every few seconds, stays on the machine: the metadata service is at a link-local address.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from hotloop.core.errors import InputError

Look = Callable[[], str]
"""Why the machine goes; empty while it stays. Raises whatever there is where that cannot be told."""

_ADDRESS = "http://169.254.169.254"
_TIMEOUT_SECONDS = 2.0
_MOST_BYTES = 2**16
_DMI = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""On the chassis of each machine of Azure; "Microsoft Corporation" alone may be anybody's Hyper-V."""


def looks(cloud: str, address: str = "", file: str = "") -> dict[str, Look]:
    """What is to be looked at, by name.

    Args:
        cloud: "aws", "gcp", "azure", "off", or "auto": that which the machine's firmware names, if any.
        address: of the metadata service; empty: where clouds have it.
        file: whose existence is a notice.

    Raises:
        InputError: there is no such cloud, or none whose service could be at the address.
    """
    known: dict[str, Callable[[_Metadata], Look]] = {"aws": _Aws, "gcp": _gcp, "azure": _Azure}
    named = cloud_of_machine() if cloud == "auto" else cloud
    if named not in (*known, "off", ""):
        raise InputError(f"{cloud}: no such cloud", f"there are auto, off, {', '.join(known)}", "preemption.cloud=auto")
    if address and named not in known:
        found_none = ", and this machine's firmware names no cloud" if cloud == "auto" else ""
        raise InputError(
            f"preemption.address = {address} would not be asked",
            f'preemption.cloud = "{cloud}"{found_none}',
            f"--set preemption.cloud={', '.join(known)}",
        )
    found = {named: known[named](_Metadata(address or _ADDRESS))} if named in known else {}
    if file:
        found[file] = lambda: f"the file {file}" if Path(file).exists() else ""
    return found


def cloud_of_machine(dmi: Path = _DMI) -> str:
    """The cloud that this machine says it is of; empty if it names none."""
    vendor, product, tag = (_text(dmi / name) for name in ("sys_vendor", "product_name", "chassis_asset_tag"))
    if vendor == "Amazon EC2" or "amazon" in _text(dmi / "bios_version"):  # on Xen the vendor is that
        return "aws"
    if product == "Google Compute Engine":
        return "gcp"
    return "azure" if tag == _AZURE_TAG else ""


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Nobody is asked but the one who was to be."""


class _Metadata:
    """A cloud's metadata service. It is asked directly: a proxy would not be on this machine."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._opener = build_opener(ProxyHandler({}), _NoRedirect())

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
        """What it says; None if there is no such thing.

        Raises:
            OSError: it does not answer.
            ValueError: it says something that is no text.
        """
        request = Request(f"{self._address}{path}", headers=dict(headers), method=method)  # noqa: S310 - http alone
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                content: bytes = answer.read(_MOST_BYTES)
                return content.decode()
        except HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise


class _Aws:
    """Two minutes' notice. The service wants a token, which holds for six hours.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    _TOKEN_SECONDS = 21600

    def __init__(self, metadata: _Metadata) -> None:
        self._metadata = metadata
        self._token = ""

    def __call__(self) -> str:
        self._token = self._token or self._new_token()
        try:
            text = self._action()
        except HTTPError as error:
            if error.code != 401:
                raise
            self._token = self._new_token()
            text = self._action()
        if text is None:
            return ""
        action = json.loads(text)
        return f"AWS: {action['action']} at {action.get('time', 'once')}"

    def _action(self) -> str | None:
        return self._metadata.ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})

    def _new_token(self) -> str:
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_SECONDS)}
        return self._metadata.ask("/latest/api/token", wanted, "PUT") or ""


def _gcp(metadata: _Metadata) -> Look:
    """30 seconds' notice. https://cloud.google.com/compute/docs/instances/create-use-preemptible"""

    def look() -> str:
        text = metadata.ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return "Google Cloud: preempted" if (text or "").strip() == "TRUE" else ""

    return look


class _Azure:
    """30 seconds' notice at least. https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events"""

    _HEADERS = {"Metadata": "true"}  # noqa: RUF012 - never written to
    _GOING = ("Preempt", "Terminate")

    def __init__(self, metadata: _Metadata) -> None:
        self._metadata = metadata
        self._name: str | None = None

    def __call__(self) -> str:
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (self._metadata.ask(path, self._HEADERS) or "").strip()
        text = self._metadata.ask("/metadata/scheduledevents?api-version=2020-07-01", self._HEADERS)
        for event in json.loads(text or "{}").get("Events", []):
            meant = not self._name or self._name in event.get("Resources", [self._name])  # others' are told as well
            if event.get("EventType") in self._GOING and meant:
                return f"Azure: {event['EventType']} not before {event.get('NotBefore') or 'now'}"
        return ""
