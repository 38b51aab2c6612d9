"""A real Slurm on this machine: munge, a controller, and two nodes with four fake GPUs each."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ports import free_ports

PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")

CONFIGURATION = """
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=15
SlurmdTimeout=10
GresTypes=gpu
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=8000 Gres=gpu:h200:4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=8000 Gres=gpu:h200:4 State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 State=UP
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> list[str]:
    """What this machine has not to run one: programs, or the right to."""
    return [name for name in PROGRAMS if not shutil.which(name)] + (["root's rights"] if os.geteuid() else [])


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Until it holds.

    Raises:
        AssertionError: it does not in time.
    """
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.5)  # to ask starts a process, which is taken from those that train


@dataclass(frozen=True)
class Cluster:
    """One that runs.

    Attributes:
        configuration: for SLURM_CONF.
        daemons: by name.
    """

    folder: Path
    configuration: Path
    daemons: "dict[str, subprocess.Popen[bytes]]"

    def call(self, *command: str) -> str:
        """What a program of Slurm's prints."""
        environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Of a job, in Slurm's words; empty once it is forgotten."""
        environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        return done.stdout.strip()

    def start_node(self, name: str) -> None:
        """Start a node's daemon."""
        self._start(name, ["slurmd", "-D", "-N", name, "-f", str(self.configuration)])

    def end_node(self, name: str) -> None:
        """End a node's daemon and all that it has started, as if its power were gone."""
        daemon = self.daemons.pop(name)
        for pid in [daemon.pid, *_offspring(daemon.pid), *_steps(self.folder, name)]:
            _kill(pid)
        daemon.wait()

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


def _parents() -> dict[int, int]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return found


def _offspring(pid: int) -> list[int]:
    parents = _parents()
    found, level = [], {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found += level
    return found


def _steps(folder: Path, node: str) -> list[int]:
    """Of a node: slurmstepd leaves its parent; with what it has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes()
            if f"SLURMD_NODENAME={node}\0".encode() in variables and str(folder).encode() in variables:
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(process.name), parent] if "slurmstepd" in _name(parent) else [int(process.name)]
        except OSError:
            continue
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """A cluster in a folder, until the block ends."""
    ports = free_ports(3)
    (folder / "state").mkdir()
    for number in range(4):
        (folder / f"nv{number}").touch()
    files = f"{folder}/nv[0-3]"
    lines = ["AutoDetect=off", *(f"NodeName={node} Name=gpu Type=h200 File={files}" for node in NODES)]
    (folder / "gres.conf").write_text("\n".join(lines) + "\n")
    configuration = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(CONFIGURATION.format(host=host, folder=folder, ports=ports))
    subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True)
    cluster = Cluster(folder, configuration, {})
    names = {word: f"--{word}={folder}/munge.{word}" for word in ("socket", "pid-file", "log-file", "seed-file")}
    munged = ["munged", "--force", "--foreground", f"--key-file={folder}/munge.key", *names.values()]
    try:
        cluster._start("munged", munged)
        wait_until(lambda: (folder / "munge.socket").exists(), "munge")
        cluster._start("slurmctld", ["slurmctld", "-D", "-f", str(configuration)])
        for node in NODES:
            cluster.start_node(node)
        command = ["sinfo", "--noheader", "--states=idle", "--partition=low", "--format=%D"]
        wait_until(lambda: _says(cluster, command, "2"), "two idle nodes")
        yield cluster
        cluster.call("scancel", "--user=root")
        wait_until(lambda: not cluster.call("squeue", "--noheader"), "the jobs' ends")
    finally:
        for name in reversed(list(cluster.daemons)):
            cluster.daemons[name].terminate()
        for daemon in cluster.daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _says(cluster: Cluster, command: Sequence[str], word: str) -> bool:
    environment = {**os.environ, "SLURM_CONF": str(cluster.configuration)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    return done.stdout.strip() == word
