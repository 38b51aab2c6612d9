"""Over which network interface another machine is reached."""

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915
"""<linux/sockios.h>: the address of an interface."""


def interface_towards(host: str) -> str:
    """The name of the interface whose address is used to reach a host; empty if that cannot be told. Sends nothing.

    gloo takes the address that the machine's own name has, which is one that others do not reach on many
    (Debian's /etc/hosts says 127.0.1.1).
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address(probe, name) == own), "")
    return ""


def _address(opened: socket.socket, name: str) -> str:
    """IPv4, of an interface; empty if it has none."""
    with suppress(OSError):
        answer = fcntl.ioctl(opened, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(answer[20:24])
    return ""
