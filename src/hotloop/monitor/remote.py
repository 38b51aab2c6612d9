"""A host whose exporter is asked over the network."""

import base64
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.live import Live, printable
from hotloop.monitor.families import CARD_METRICS, JOB_METRICS, PREFIX
from hotloop.monitor.loopback import is_loopback
from hotloop.monitor.reading import Card, CardsReading, Driver, JobsReading

_SECONDS = 5.0
_MOST_BYTES = 16 * 2**20


class RemoteHost:
    """What an exporter tells of its host, read back.

    Args:
        url: of the exporter, or of its metrics.
        user, password: if it asks for them.
        authority: a file of certificates that its own is checked against; None: the system's.

    Raises:
        InputError: that is no URL of http or https, the password would travel readably, or the certificates cannot be
            read.
    """

    def __init__(self, url: str, user: str = "", password: str = "", authority: Path | None = None) -> None:
        parts = _parts(url)
        self.place = parts.netloc
        if user and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            cause = f"{parts.hostname} is not this machine, and http:// does not encrypt"
            raise InputError(f"--url {url} would send the password readably", cause, f"--url https://{parts.netloc}")
        whole = url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"
        self._request = urllib.request.Request(whole)  # noqa: S310, http or https as seen above
        if user:
            words = base64.b64encode(f"{user}:{password}".encode()).decode()
            self._request.add_header("Authorization", f"Basic {words}")
        try:
            context = ssl.create_default_context(cafile=str(authority) if authority else None)
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"--ca {authority} cannot be used", str(error), "a file of certificates in PEM") from None
        no_others = urllib.request.ProxyHandler({})
        self._opener = urllib.request.build_opener(no_others, urllib.request.HTTPSHandler(context=context), _NoRedirect)
        self._jobs = JobsReading()

    def cards(self) -> CardsReading:
        """All cards; the jobs are read with them.

        Raises:
            HotloopError: it does not answer, or with something else.
        """
        try:
            families = list(text_string_to_metric_families(self._text()))
            if not any(family.name.startswith(PREFIX) for family in families):
                raise ValueError(f"no name in it begins with {PREFIX}")
            cards, self._jobs = cards_of(families), JobsReading(jobs_of(families))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            what = f"{self.place} does not tell metrics of hotloop's"
            raise HotloopError(what, printable(str(error)), _EXAMPLE) from None
        return cards

    def jobs(self) -> JobsReading:
        """Those that were read with the cards."""
        return self._jobs

    def close(self) -> None:
        """There is nothing to close."""

    def _text(self) -> str:
        try:
            with self._opener.open(self._request, timeout=_SECONDS) as answer:
                return str(answer.read(_MOST_BYTES).decode())
        except urllib.error.HTTPError as error:
            fix = "--user NAME, and the password in HOTLOOP_WATCH_PASSWORD" if error.code == 401 else _EXAMPLE
            raise HotloopError(f"{self.place} refuses", f"HTTP {error.code} {printable(error.reason)}", fix) from None
        except http.client.HTTPException as error:
            cause = printable(f"it speaks no HTTP: {error}")
            raise HotloopError(f"{self.place} does not answer", cause, _EXAMPLE) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            fix = f"see that it runs: hotloop exporter --listen {self.place}"
            if isinstance(reason, ssl.SSLCertVerificationError):
                fix = "--ca FILE, the certificate of who signed its own"
            raise HotloopError(f"{self.place} does not answer", printable(str(reason)), fix) from None


_EXAMPLE = "--url http://127.0.0.1:9400"


def _parts(url: str) -> SplitResult:
    """Of an address that can be asked, without a password."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        right = False
    if "@" in url:
        raise InputError(
            "--url holds a name or a password", "others see it in the list of processes",
            "--user NAME, and the password in HOTLOOP_WATCH_PASSWORD",
        )  # fmt: skip
    if not right or not url.isprintable() or " " in url:
        raise InputError(f"--url {url!r} is no address", "an exporter answers at http:// or https://", _EXAMPLE)
    return parts


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Neither a password nor trust goes to another address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def cards_of(families: Iterable[Metric]) -> CardsReading:
    """The cards that metrics tell of; parts of divided ones are left out."""
    by_name = {family.name.removeprefix(PREFIX): family for family in families}
    cards: dict[str, Card] = {}
    for sample in _samples(by_name, "gpu_reading_ok"):
        labels = sample.labels
        name = labels["uuid"] or labels["gpu"]  # what has hung from the start has no other
        cards[name] = Card(int(labels["gpu"]), labels["uuid"], answers=bool(sample.value))
    for sample in _samples(by_name, "gpu_info"):
        if sample.labels["uuid"] in cards:
            names = {key: sample.labels[key] for key in ("name", "bus_id", "mig")}
            cards[sample.labels["uuid"]] = replace(cards[sample.labels["uuid"]], **names)
    for one in CARD_METRICS:
        found: dict[str, Any] = {}
        for sample in _samples(by_name, one.name.removesuffix("_total")):
            if one.labels:
                key = tuple(sample.labels[label] for label in one.labels)
                found.setdefault(sample.labels["uuid"], {})[key if len(key) > 1 else key[0]] = sample.value
            else:
                found[sample.labels["uuid"]] = sample.value
        for uuid in found.keys() & cards.keys():
            cards[uuid] = replace(cards[uuid], **{one.field: found[uuid]})
    drivers = [sample.labels for sample in _samples(by_name, "driver_info")]
    driver = Driver(drivers[0]["version"], drivers[0]["cuda"]) if drivers else None
    return CardsReading(driver=driver, cards=tuple(sorted(cards.values(), key=lambda card: card.index)))


def jobs_of(families: Iterable[Metric]) -> tuple[Live, ...]:
    """The processes that metrics tell of; their numbers are not among them."""
    by_name = {family.name.removeprefix(PREFIX): family for family in families}
    known: dict[tuple[str, str, str], dict[str, Any]] = {}
    for sample in _samples(by_name, "job_info"):
        labels = sample.labels
        known[_who(labels)] = {
            "pid": 0, "started": 0, "namespace": 0, "way": labels["way"], "job": labels["job_name"],
            "run": labels["run"], "rank": int(labels["rank"]), "ranks": int(labels["ranks"]), "gpu": labels["uuid"],
            "metrics": {},
        }  # fmt: skip
    whole = {one.name for one in fields(Live) if one.type is int}
    for one in JOB_METRICS:
        for sample in _samples(by_name, one.name.removesuffix("_total")):
            if _who(sample.labels) in known:
                value = int(sample.value) if one.field in whole else sample.value
                known[_who(sample.labels)][one.field] = value
    for sample in _samples(by_name, "job_phase"):
        if sample.value and _who(sample.labels) in known:
            known[_who(sample.labels)]["phase"] = sample.labels["phase"]
    for sample in _samples(by_name, "job_metric"):
        if _who(sample.labels) in known:
            known[_who(sample.labels)]["metrics"][sample.labels["metric"]] = sample.value
    return tuple(Live(**one) for one in known.values())


def _samples(by_name: dict[str, Metric], name: str) -> list[Any]:
    """Of one name, with labels that can be shown: who answers may be anybody."""
    found = by_name[name].samples if name in by_name else []
    return [one._replace(labels={key: printable(text) for key, text in one.labels.items()}) for one in found]


def _who(labels: dict[str, str]) -> tuple[str, str, str]:
    return labels["job_name"], labels["run"], labels["rank"]
