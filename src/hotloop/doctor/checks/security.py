"""What attackers look for first. Nothing here is an error: it is the owner's to weigh."""

from collections.abc import Iterator

from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord

_OPEN_DOORS = {
    2375: "docker's API without TLS", 6379: "Redis", 8265: "Ray's dashboard, which starts programs",
    8888: "Jupyter", 6006: "TensorBoard", 5000: "MLflow", 10001: "Ray's client port", 2379: "etcd", 27017: "MongoDB",
    29500: "torch's rendezvous, which trusts whoever connects",
}  # fmt: skip
_EXPORTERS = {9400: "dcgm-exporter", 9835: "nvidia_gpu_exporter", 9100: "node_exporter", 9401: "hotloop exporter"}
_SYS_ADMIN = 1 << 21


def ssh(record: MachineRecord) -> Iterator[Seen]:
    """Ways in by password."""
    if record.security.ssh_password:
        yield Seen("ssh-password", "sshd allows passwords")
    if record.security.ssh_root == "yes":
        yield Seen("ssh-root", "PermitRootLogin yes")


def listeners(record: MachineRecord) -> Iterator[Seen]:
    """Services on every interface."""
    for one in record.security.listeners:
        who = f" ({one.process})" if one.process else ""
        if one.port in _EXPORTERS:
            yield Seen("exporter-open", f"port {one.port} on {one.address}{who}: {_EXPORTERS[one.port]}")
        elif one.port in _OPEN_DOORS:
            yield Seen("service-open", f"port {one.port} on {one.address}{who}: {_OPEN_DOORS[one.port]}")


def keys(record: MachineRecord) -> Iterator[Seen]:
    """Private keys that others can read."""
    if record.security.readable_keys:
        paths = record.security.readable_keys
        yield Seen("key-readable", ", ".join(paths), f"chmod 600 {' '.join(paths)}")


def container(record: MachineRecord) -> Iterator[Seen]:
    """What a container should not have."""
    system = record.system
    if not system.container:
        return
    if record.security.container_socket:
        yield Seen("container-socket", f"{record.security.container_socket} is in this container")
    if system.effective_capabilities & _SYS_ADMIN and system.container in ("docker", "podman", "kubernetes"):
        yield Seen("container-privileged", f"capabilities {system.effective_capabilities:#x}: it may do what root may")
    elif system.user_id == 0:
        yield Seen("container-root", "user 0 in the container")


CHECKS: tuple[Check, ...] = (ssh, listeners, keys, container)
