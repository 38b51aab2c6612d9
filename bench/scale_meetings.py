"""How ranks meet: gloo's connections, and the store in which they find each other, of as many as fit on a machine.

What is a process of its own here is this file, started with what it is to be.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from scale_costs import Measured, Peak, processor_seconds
from torch import distributed

from hotloop.train.sharded import mesh_of
from hotloop.train.world import joined_world

_PATIENCE = timedelta(seconds=300)


class CountingStore(distributed.Store):
    """Counts what ranks of this process tell each other to connect."""

    def __init__(self) -> None:
        super().__init__()
        self._changed, self._values = threading.Condition(), dict[str, bytes]()
        self.read = self.asked = 0

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            self.read += len(self._values[key])
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta = _PATIENCE) -> None:
        with self._changed:
            self.asked += 1
            self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds())


def allow_open_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def meshed(store: distributed.Store, ranks: int) -> list[Any]:
    """Ranks of this process, connected by gloo."""
    made: list[Any] = [None] * ranks

    def join(rank: int) -> None:
        made[rank] = distributed.ProcessGroupGloo(store, rank, ranks, _PATIENCE)

    joining = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for one in joining:
        one.start()
    for one in joining:
        one.join()
    assert all(made)
    return made


def connections(ranks: int) -> Measured:
    """Of one gloo group, with all of its ranks in this process: what one end of a connection costs."""
    allow_open_files()
    ends, before = ranks * (ranks - 1), sockets()
    peak, began = Peak(), processor_seconds()
    kept = meshed(distributed.HashStore(), ranks)
    seconds = processor_seconds() - began
    memory = peak.bytes()
    opened = sockets()
    counting = CountingStore()
    kept += meshed(counting, ranks)
    assert counting.read == ranks * ranks * named_bytes(ranks)
    return {
        "ranks": ranks, "ends": ends, "connected": opened["connected"] - before["connected"],
        "end_seconds": seconds / ends, "end_memory_bytes": memory / ends,
        "store_read_bytes": counting.read // ranks, "store_requests": counting.asked // ranks,
    }  # fmt: skip


def talking(ranks: int) -> Measured:
    """Of one gloo group that connects ranks when they talk: what a rank has to read, and its connections, on average,
    after each kind of message. All ranks are in this process.
    """
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    allow_open_files()
    before, counting = sockets()["connected"], CountingStore()
    group = meshed(counting, ranks)
    assert counting.asked == 0
    given = torch.ones(4)
    for message in (
        lambda rank: group[rank].allreduce([given.clone()]),
        lambda rank: group[rank].allgather([[given.clone() for _ in range(ranks)]], [given]),
        lambda rank: group[rank].gather([[given.clone() for _ in range(ranks)]] if rank == 0 else [], [given]),
        lambda rank: group[rank].broadcast([given.clone()]),
        lambda rank: group[rank].barrier(),
    ):
        with ThreadPoolExecutor(ranks) as pool:
            for work in pool.map(message, range(ranks)):
                work.wait()
    assert counting.read == counting.asked // 2 * named_bytes(0), "each is waited for, and read"
    return {
        "ranks": ranks, "connected": (sockets()["connected"] - before) / ranks,
        "store_read_bytes": counting.read / ranks, "store_requests": counting.asked / ranks,
    }  # fmt: skip


def sockets() -> dict[str, int]:
    """This process's: connections, those that others can connect to, and other files that it has open."""
    states = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            states[f"socket:[{fields[9]}]"] = fields[3]
    found = {"connected": 0, "listening": 0, "others": 0}
    for name in os.listdir("/proc/self/fd"):
        try:
            state = states.get(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the folder itself
            continue
        found[{"01": "connected", "0A": "listening"}.get(state or "", "others")] += 1
    return found


def peer() -> Measured:
    """One of several processes that join as `hotloop train` has them."""
    with joined_world("cpu", _PATIENCE.total_seconds()) as world:
        found = {"joined": sockets()}
        group = distributed.new_group([*range(world.size)], use_local_synchronization=True)  # as `Ranks` does for ddp
        found["ddp"] = sockets()
        for one in (group, None):
            distributed.all_reduce(torch.ones(4), group=one)
        world.any(True)
        world.gathered(world.rank)
        world.gathered_on_first(world.rank)
        found["used"] = sockets()
        taken = []
        for _ in range(110):
            began = time.perf_counter()
            world.any(False)
            taken.append(time.perf_counter() - began)
        mesh_of(world, "cpu")
        found["fsdp more"] = {"connected": sockets()["connected"] - found["used"]["connected"]}
        mesh_of(replace(world, tensor=2), "cpu")
        found["fsdp+tp more"] = {"connected": sockets()["connected"] - found["used"]["connected"]}
        world.any(True)
    return {**found, "any_seconds": taken[10:]}


def joined(ranks: int, lazily: bool) -> Measured:
    """Sockets of the last of so many processes, and of the first, which holds the store; how long `World.any` takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "TORCH_GLOO_LAZY_INIT": str(int(lazily)), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "peer"]
    peers = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    found = [json.loads(one.communicate(timeout=600)[0]) for one in peers]
    taken = [one.pop("any_seconds") for one in found]
    return {"ranks": ranks, "lazily": lazily, "first": found[0], "last": found[-1], "any_clock_seconds": taken[0]}


def store(ranks: int, lazily: bool) -> Measured:
    """Of the store in which ranks find each other: one rank reads what gloo needs to know of so many, for one group.

    Its server is a process of its own; what that computes for it is what all ranks together wait for.
    """
    each = named_bytes(0 if lazily else ranks)
    command = [sys.executable, __file__, "serve"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin
    assert server.stdout
    port = int(server.stdout.readline())
    client = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
    for rank in range(ranks):
        client.set(str(rank), b"0" * each)

    def computed() -> float:
        ticks = Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    before, began = computed(), time.perf_counter()
    for rank in range(ranks):
        client.wait([str(rank)], _PATIENCE)
        assert len(client.get(str(rank))) == each
    seconds, served = time.perf_counter() - began, computed() - before
    server.communicate("\n", timeout=60)
    return {
        "ranks": ranks, "lazily": lazily, "read_bytes": ranks * each, "read_clock_seconds": seconds,
        "server_seconds": served,
    }  # fmt: skip


def named_bytes(ranks: int) -> int:
    """What gloo puts there of a rank: its host's name and address, and a number for each rank that is to be connected
    at once (its tcp/context.cc).
    """
    return 8 * ranks + 152 + len(socket.gethostname())


def serve() -> Measured:
    served = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    print(served.port, flush=True)
    sys.stdin.readline()
    return {}


if __name__ == "__main__":
    print(json.dumps({"peer": peer, "serve": serve}[sys.argv[1]]()), flush=True)
    os._exit(0)
