"""`hotloop serve`."""

import signal
from contextlib import suppress
from pathlib import Path
from threading import Thread

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--root", default="runs", type=click.Path(file_okay=False, path_type=Path), help="Folder of the runs.",
              show_default=True)  # fmt: skip
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", show_default=True,
              help="Where to listen; any other lets others read, without a password.")  # fmt: skip
@click.option("--port", default=8642, type=click.IntRange(0, 65535), show_default=True, help="0: any that is free.")
def serve(root: Path, host: str, port: int) -> int:
    """Show runs and live trainings in a browser.

    It prints its address and goes on until Ctrl-C. Nothing is written, and nothing comes from elsewhere.
    """
    from hotloop.core.errors import InputError
    from hotloop.core.live import Seen, live_folder, read_live
    from hotloop.monitor.loopback import is_loopback
    from hotloop.monitor.web.server import Server
    from hotloop.monitor.web.site import Site

    if not host:
        raise InputError("no address to listen at", "--host is empty, which would be all of them", "--host 127.0.0.1")
    folder = live_folder()

    def look() -> Seen:
        with suppress(OSError):  # a folder that cannot be read at the moment: runs are shown all the same
            if folder:
                return read_live(folder)
        return Seen((), {})

    site = Site(root, look)
    with Server((host, port), site) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: Thread(target=server.shutdown).start())
        if not is_loopback(host):
            click.echo("warning: everybody who reaches this address can read runs and trainings", err=True)
        if not root.is_dir():
            click.echo(f"warning: there is no folder {root} yet: live trainings alone are shown", err=True)
        click.echo(server.url)
        server.serve_forever(poll_interval=0.1)
    return 0
