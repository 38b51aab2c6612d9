"""Ports for servers that tests start."""

import socket
from contextlib import ExitStack, suppress
from random import SystemRandom

_BELOW_GIVEN = range(20_000, 32_000)
"""Linux gives ports from 32768 on to connections: one of those was taken between its choice and its use."""


def free_ports(count: int) -> list[int]:
    """That nobody listens on."""
    found: list[int] = []
    with ExitStack() as stack:
        for port in SystemRandom().sample(_BELOW_GIVEN, 100):
            one = stack.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("hardly a port is free")


def free_port() -> int:
    return free_ports(1)[0]
