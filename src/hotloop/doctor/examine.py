"""All checks over a record. A check looks at the record alone, never at the machine."""

from hotloop.doctor.checks import (
    cards,
    driver,
    environment,
    limits,
    links,
    network,
    packages,
    probes,
    security,
    storage,
)
from hotloop.doctor.finding import GROUPS, LEVELS, Finding, finding
from hotloop.doctor.record import MachineRecord

_MODULES = (driver, cards, links, packages, limits, storage, network, environment, security, probes)
_NEEDS = {
    limits: {"system"},
    network: {"environment"},
    environment: {"environment"},
    security: {"environment", "system"},
}
"""Readers without which a module's checks would judge what nobody read."""
READERS = {
    "driver": {"nvml", "devices"}, "cards": {"nvml"}, "links": {"nvml"}, "packages": {"torch", "packages"},
    "limits": {"system"}, "network": {"environment"}, "environment": {"environment"}, "security": {"environment"},
    "clock": {"system"},
}  # fmt: skip
"""Of a group that is shown: where one has failed, it is not all right, but unknown."""


def examine(record: MachineRecord) -> list[Finding]:
    """What is wrong: by group, the worst first."""
    modules = [module for module in _MODULES if not _NEEDS.get(module, set()) & set(record.unread)]
    found = [finding(seen) for module in modules for check in module.CHECKS for seen in check(record)]
    groups = list(GROUPS)
    return sorted(found, key=lambda one: (groups.index(one.group), LEVELS.index(one.level), one.id))
