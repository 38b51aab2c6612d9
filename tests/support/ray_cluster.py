"""A real Ray on this machine: a head that computes nothing, and nodes with two processors each."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ports import free_ports

SUPPORT = Path(__file__).parent
_MARK = "HOTLOOP_TEST_RAY"


def missing() -> str:
    """Why none can be started here; empty if it can."""
    return "" if importlib.util.find_spec("ray") else 'ray is not installed: pip install "hotloop[ray]"'


def wait_until(is_so: Callable[[], object], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.5)  # to ask starts a process, which is taken from those that train


@dataclass
class Cluster:
    """
    Attributes:
        address: of its own port.
        web: of its dashboard.
        ports: all different: Ray starts with no two that are the same.
    """

    folder: Path
    address: str
    web: str
    mark: str
    ports: Iterator[int]
    daemons: "dict[str, subprocess.Popen[str]]" = field(default_factory=dict)

    def start(self, name: str, *options: str) -> None:
        """`ray start`, in a process group of its own."""
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            _MARK: self.mark, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "RAY_prestart_worker_first_driver": "0",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus=0", *options,
                   "--object-store-memory=80000000", f"--dashboard-agent-listen-port={next(self.ports)}"]  # fmt: skip
        with (self.folder / f"{name}.log").open("w") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
                text=True,
            )  # fmt: skip

    def add_node(self, name: str) -> None:
        """Two processors; it joins some time later."""
        self.start(name, f"--address={self.address}", "--num-cpus=2", f"--labels=name={name}")

    def says(self, name: str, words: str) -> bool:
        text = (self.folder / f"{name}.log").read_text()
        assert self.daemons[name].poll() is None, text
        return words in text

    def nodes(self) -> dict[str, str]:
        """Name -> id of those that are there."""
        done = self.call("-c", _NODES, self.address)
        return dict(line.split() for line in done.splitlines())

    @contextmanager
    def drainer(self) -> Iterator[Callable[[], None]]:
        """What tells Ray that the machines of all workers are about to be taken away, at once when it is called."""
        with subprocess.Popen(
            [sys.executable, "-c", _DRAINER, self.address, self.web], text=True, env=self._environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline() == "ready\n"

            def drain() -> None:
                out, _ = process.communicate("now\n", timeout=60)
                assert out == "(True, '')\n"

            yield drain
            process.kill()

    def call(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=self._environment(), timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

    def left(self) -> list[int]:
        """Processes of it, and of drivers that it has started."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{_MARK}={self.mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found


_NODES = """
import logging, sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
for node in ray.nodes():
    if node["Alive"] and "name" in node["Labels"]:
        print(node["Labels"]["name"], node["NodeID"])
"""

_DRAINER = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from ray.util.state import list_actors
client = GcsClient(address=sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
workers = list_actors(sys.argv[2], filters=[("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")])
for node in {worker.node_id for worker in workers}:
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    print(client.drain_node(node, reason, "spot", int((time.time() + 120) * 1000)))
"""


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """A head and the node "first"; nothing of it is left at the end."""
    with tempfile.TemporaryDirectory(prefix="hl-ray-") as name, ExitStack() as stack:  # sockets need short paths
        ports = iter(free_ports(20))
        port, web = next(ports), next(ports)
        cluster = Cluster(Path(name), f"127.0.0.1:{port}", f"http://127.0.0.1:{web}", uuid.uuid4().hex, ports)
        stack.callback(_end, cluster)
        cluster.start(
            "head", "--head", f"--port={port}", "--num-cpus=0", f"--temp-dir={name}", "--include-dashboard=true",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={web}", f"--ray-client-server-port={next(ports)}",
        )  # fmt: skip
        wait_until(lambda: cluster.says("head", "Ray runtime started"), "head of Ray")
        cluster.add_node("first")
        wait_until(lambda: "first" in cluster.nodes(), "first node of Ray")
        yield cluster


def _end(cluster: Cluster) -> None:
    for daemon in reversed(cluster.daemons.values()):
        daemon.terminate()
    for daemon in cluster.daemons.values():
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(30)
    end = time.monotonic() + 20
    while (left := cluster.left()) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for daemon in cluster.daemons.values():
        daemon.wait()
    assert not left, f"{len(left)} processes of Ray had to be killed"


def worker_of(log: str, rank: int) -> int:
    """The process that is this rank, by what Ray Train has written last."""
    return int(re.findall(rf"pid=(\d+)\) world_rank={rank},", log)[-1])
