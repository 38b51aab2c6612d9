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
from hotloop.doctor.finding import GROUPS, LEVELS, Check, Finding, finding
from hotloop.doctor.record import MachineRecord

CHECKS: tuple[Check, ...] = tuple(
    check
    for module in (driver, cards, links, packages, limits, storage, network, environment, security, probes)
    for check in module.CHECKS
)


def examine(record: MachineRecord) -> list[Finding]:
    """What is wrong: by group, the worst first."""
    found = [finding(seen) for check in CHECKS for seen in check(record)]
    groups = list(GROUPS)
    return sorted(found, key=lambda one: (groups.index(one.group), LEVELS.index(one.level), one.id))
