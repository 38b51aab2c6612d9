"""Whether what is sent to a host leaves this machine."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is this machine by its loopback; names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
