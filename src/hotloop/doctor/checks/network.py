"""What joins machines."""

from collections.abc import Iterator

from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord


def rdma(record: MachineRecord) -> Iterator[Seen]:
    """InfiniBand and RoCE."""
    ports = [port for port in record.rdma if port.kind == "InfiniBand"]  # others are network cards that could do more
    down = [port for port in ports if port.state != "active"]
    if down and len(down) < len(ports):
        yield Seen("rdma-port-down", ", ".join(f"{port.name} is {port.state}" for port in down))
    elif down:
        yield Seen("rdma-down", ", ".join(f"{port.name} is {port.state}" for port in down))
    active = len(down) < len(ports)
    if active and record.environment.get("NCCL_IB_DISABLE") == "1":
        yield Seen("nccl-ib-disabled", f"NCCL_IB_DISABLE=1 with {ports[0].name} ({ports[0].rate})")
    if active and record.gpus and not {"nvidia_peermem", "gdrdrv"} & set(record.system.modules):
        yield Seen("peermem-missing", f"{len(ports)} RDMA ports, kernel module nvidia_peermem is not loaded")


def interfaces(record: MachineRecord) -> Iterator[Seen]:
    """Names that NCCL and gloo are told."""
    names = {one.name: one for one in record.interfaces}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = record.environment.get(variable, "")
        if not value or value.startswith("^") or not names:
            continue
        exact = value.startswith("=")
        wanted = value.removeprefix("=").split(",")
        met = [
            one for word in wanted for name, one in names.items()
            if name == word or (not exact and variable.startswith("NCCL") and name.startswith(word))
        ]  # fmt: skip
        if not met:
            yield Seen("socket-interface-missing", f"{variable}={value}; there are {', '.join(sorted(names))}")
        elif not any(one.up for one in met):
            yield Seen("socket-interface-down", f"{variable}={value}: {met[0].name} is down")


def own_name(record: MachineRecord) -> Iterator[Seen]:
    """The rendezvous asks for the machine's own address."""
    if record.system.hostname_resolves is False:
        yield Seen("hostname-unresolved", f"{record.system.hostname} has no address")


CHECKS: tuple[Check, ...] = (rdma, interfaces, own_name)
