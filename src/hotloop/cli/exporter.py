"""`hotloop exporter`."""

import ctypes
import ipaddress
import json
import signal
import socket
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotloop.core.errors import HotloopError, InputError

if TYPE_CHECKING:
    from hotloop.monitor.metrics import Metrics
    from hotloop.monitor.otlp import Pusher
    from hotloop.monitor.reading import Host
    from hotloop.monitor.web_config import Web

_DEFAULT = "127.0.0.1:9400"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--listen", default=_DEFAULT, show_default=True, metavar="ADDRESS:PORT",
              help="Where to answer; by default for this machine alone.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), help="Another port than that of --listen; 0: a free one.")
@click.option("--web-config", type=click.Path(path_type=Path), metavar="FILE",
              help="TLS and passwords, as Prometheus's exporters take them.")  # fmt: skip
@click.option("--otlp", metavar="URL",
              help="Send all metrics to this OpenTelemetry collector as well (OTLP over HTTP).")  # fmt: skip
@click.option("--otlp-every", type=click.IntRange(1, 3600), default=15, show_default=True, metavar="SECONDS",
              help="Between two times that --otlp sends.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print the metrics, send them once with --otlp, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print one JSON object.")
@click.option("--demo", is_flag=True, help="Show an invented host of 8 H200 and its jobs.")
@click.option("--machine", type=click.Path(path_type=Path), metavar="FILE",
              help="With --demo: the cards of a machine that `hotloop doctor --save` wrote.")  # fmt: skip
def exporter(
    listen: str, port: int | None, web_config: Path | None, otlp: str | None, otlp_every: int, once: bool,
    as_json: bool, demo: bool, machine: Path | None,
) -> int:  # fmt: skip
    """Serve metrics of cards and trainings to Prometheus.

    All NVIDIA cards of this machine, and all trainings of hotloop on it, are read when somebody asks. Ends at Ctrl-C or
    SIGTERM.
    """
    if as_json and not once:
        raise InputError("--json needs --once", "a server prints no metrics", "hotloop exporter --once --json")
    if machine and not demo:
        fix = f"hotloop exporter --demo --machine {machine}"
        raise InputError("--machine needs --demo", "a saved machine is not this one", fix)
    address = _address(listen, port)
    try:
        from hotloop.monitor.metrics import Metrics
    except ImportError as error:
        cause = f"{error.name} is not installed"
        raise InputError("the exporter needs hotloop[monitor]", cause, 'pip install "hotloop[monitor]"') from None
    web = _web(web_config) if web_config else None
    host = _host(demo, machine)
    try:
        metrics = Metrics(host)
        pusher = _pusher(otlp, metrics, otlp_every) if otlp is not None else None
        if once:
            _print(metrics, as_json)
            _push(pusher)
        else:
            _serve(metrics, address, web, pusher)
    finally:
        host.close()
    return 0


def _address(listen: str, port: int | None) -> tuple[str, int]:
    """A numeric address and a port."""
    name, _, number = listen.rpartition(":")
    name = name.removeprefix("[").removesuffix("]")
    fix = f"--listen {_DEFAULT}; --listen 0.0.0.0:9400 for every network of this machine"
    if not name or not number.isdecimal() or int(number) > 65535:
        raise InputError(f"--listen {listen!r} is not ADDRESS:PORT", "both are needed, the port up to 65535", fix)
    try:
        found = socket.getaddrinfo(name, int(number), type=socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--listen {listen!r}: no address {name}", cause, fix) from None
    return str(found[0]), int(number) if port is None else port


def _web(path: Path) -> "Web":
    from hotloop.monitor.web_config import Web

    return Web(path, lambda line: click.echo(f"warning: {line}", err=True))


def _pusher(url: str, metrics: "Metrics", every_seconds: int) -> "Pusher":
    try:
        from hotloop.monitor.otlp import Pusher, travels_readably
    except ImportError as error:
        cause = f"{error.name} is not installed"
        raise InputError("--otlp needs hotloop[otlp]", cause, 'pip install "hotloop[monitor,otlp]"') from None
    pusher = Pusher(url, metrics, every_seconds, lambda line: click.echo(f"warning: {line}", err=True))
    if machine := travels_readably(url):
        click.echo(f"warning: metrics travel readably to {machine}; https:// encrypts them", err=True)
    return pusher


def _push(pusher: "Pusher | None") -> None:
    trouble = pusher.push() if pusher else ""
    if trouble:
        raise HotloopError(
            "no metrics reach the collector", trouble, "see that it runs, and takes OTLP over HTTP there"
        )


def _host(demo: bool, machine: Path | None) -> "Host":
    if demo:
        from hotloop.monitor.demo import Demo, recorded

        return Demo(*recorded(machine)) if machine else Demo()
    from hotloop.monitor.host import ThisHost

    return ThisHost()


def _print(metrics: "Metrics", as_json: bool) -> None:
    if as_json:
        samples = [
            {"name": one.name, "labels": one.labels, "value": one.value}
            for family in metrics.collect()
            for one in family.samples
        ]
        click.echo(json.dumps({"samples": samples}))
    else:
        from prometheus_client.exposition import generate_latest

        click.echo(generate_latest(metrics).decode(), nl=False)


def _serve(metrics: "Metrics", address: tuple[str, int], web: "Web | None", pusher: "Pusher | None") -> None:
    """Until a signal comes."""
    from hotloop.monitor.server import Server

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = Server(address, metrics, web)
    except OSError as error:
        what = f"cannot listen on {address[0]} port {address[1]}"
        raise InputError(what, error.strerror or str(error), "--port 0 takes a free one, or --listen") from None
    _warn(address[0], web)
    _give_back()
    with server, pusher or nullcontext():
        click.echo(server.url)  # it listens already; where that cannot be written, no thread is to be ended
        thread = threading.Thread(target=server.serve_forever, name="server")
        thread.start()
        ended.wait()
        server.shutdown()
        thread.join()


def _give_back() -> None:
    """Memory that starting took: where no compiled modules are kept, 12 MB of compiling would stay."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _warn(address: str, web: "Web | None") -> None:
    """Say on standard error what others could read; nothing where nobody else gets to it."""
    if ipaddress.ip_address(address).is_loopback:
        return
    if not web or not (web.encrypted or web.guarded):
        told = "everybody who reaches it can read the metrics; --web-config adds TLS and passwords"
    elif not web.encrypted:
        told = "passwords travel readably; a tls_server_config in --web-config encrypts them"
    elif not web.guarded:
        told = "everybody who reaches it can read the metrics; basic_auth_users in --web-config names who may"
    else:
        return
    click.echo(f"warning: {address} is open to the network: {told}", err=True)
