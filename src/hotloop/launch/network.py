"""NCCL and the network between machines: what is set for it and why, and settings of it that contradict each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotloop.core.job import LaunchSection
from hotloop.launch.finding import LaunchFinding


@dataclass(frozen=True)
class Variable:
    """One that is set for a training, and why."""

    name: str
    value: str
    why: str


def network_variables(launch: LaunchSection) -> tuple[Variable, ...]:
    """What a job's network settings mean for NCCL and gloo (NCCL's user guide, "Environment Variables")."""
    found = []
    if launch.interface:
        why = f'launch.interface = "{launch.interface}"'
        found.append(Variable("NCCL_SOCKET_IFNAME", launch.interface, why))
        if not launch.interface.startswith(("^", "=")):  # gloo takes names alone
            found.append(Variable("GLOO_SOCKET_IFNAME", launch.interface, why))
    why = f'launch.network = "{launch.network}"'
    if launch.network == "ethernet":
        found.append(Variable("NCCL_IB_DISABLE", "1", why))
    if launch.network == "efa":
        found += [Variable("FI_PROVIDER", "efa", why), Variable("NCCL_NET", "AWS Libfabric", why)]
    if launch.network == "infiniband":  # without it NCCL falls back to sockets silently
        found.append(Variable("NCCL_NET", "IB", why))
    if launch.topology_file:
        why = f'launch.topology_file = "{launch.topology_file}"'
        found.append(Variable("NCCL_TOPO_FILE", launch.topology_file, why))
    return tuple(found)


def network_findings(
    launch: LaunchSection, nodes: int, shell: Mapping[str, str], interfaces: Sequence[str] | None
) -> list[LaunchFinding]:
    """Settings that contradict each other, or do what nobody wants.

    Args:
        nodes: machines of the training.
        shell: the variables that it finds, which launch.environment overrides.
        interfaces: of the machine that it runs on; None: not known.
    """
    names = ("NCCL_", "GLOO_", "FI_")
    given = {name: value for name, value in {**shell, **launch.environment}.items() if name.startswith(names)}
    found = []
    for one in network_variables(launch):
        if given.get(one.name, one.value) != one.value:
            what = f"{one.name}={given[one.name]} is set, and {one.why} means {one.value}"
            found.append(LaunchFinding("network-variable", what, _without(launch, one.name)))
    rules = [
        ("infiniband-disabled", launch.network == "infiniband" and given.get("NCCL_IB_DISABLE") == "1",
         'NCCL_IB_DISABLE=1, and launch.network = "infiniband"', _without(launch, "NCCL_IB_DISABLE")),
        ("loopback", nodes > 1 and (given.get("NCCL_SOCKET_IFNAME") or launch.interface) == "lo",
         f"{nodes} machines cannot meet over lo",
         '--set launch.interface=""' if launch.interface else _without(launch, "NCCL_SOCKET_IFNAME")),
        ("peer-to-peer-disabled", given.get("NCCL_P2P_DISABLE") == "1",
         "NCCL_P2P_DISABLE=1: the GPUs of a machine talk through its memory", _without(launch, "NCCL_P2P_DISABLE")),
        ("shared-memory-disabled", given.get("NCCL_SHM_DISABLE") == "1",
         "NCCL_SHM_DISABLE=1: the GPUs of a machine talk over the network", _without(launch, "NCCL_SHM_DISABLE")),
        ("debug-always", given.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"),
         f"NCCL_DEBUG={given.get('NCCL_DEBUG')} writes thousands of lines",
         f"{_without(launch, 'NCCL_DEBUG')}: hotloop sets it after a failure"),
    ]  # fmt: skip
    found += [LaunchFinding(name, what, fix) for name, wrong, what, fix in rules if wrong]
    named = launch.interface.lstrip("^=").split(",") if launch.interface else []
    absent = [name for name in named if interfaces is not None and not any(one.startswith(name) for one in interfaces)]
    if absent and not launch.interface.startswith("^"):
        have = ", ".join(interfaces or ()) or "none"
        found.append(LaunchFinding("interface-absent", f"no interface {', '.join(absent)}; this machine has {have}",
                                   f"--set launch.interface={next(iter(interfaces or ['NAME']))}"))  # fmt: skip
    return found


def _without(launch: LaunchSection, name: str) -> str:
    return f"remove launch.environment.{name}" if name in launch.environment else f"unset {name}"
