"""What thousands of ranks cost that train one model: plans of division, metadata of checkpoints, agreeing, meeting.

Plans and agreements: nothing is computed and nothing sent. One process is the first of so many ranks (PyTorch's fake
process group), and its model has shapes but no memory (meta device). What the other ranks would send is put in, so that
it has as much to hold and to read as it would have; what a network takes is in no figure.

Meetings are real, of as many ranks as fit here: gloo's connections, and the store in which ranks find each other.

Each figure is of some processes that measure nothing else. Seconds are the processor's, as others may use the machine
meanwhile; `clock_seconds` are the clock's. `python bench/scale.py --json`
"""

import argparse
import ctypes
import json
import math
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import Figure, of_this_source, publish
from torch import Tensor, distributed
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from hotloop.tasks.transformers import build_decoder
from hotloop.train.agreement import NOTHING, Agreement, Wishes
from hotloop.train.checkpoint import parts
from hotloop.train.random_state import random_state
from hotloop.train.sharded import Types, divide, mesh_of
from hotloop.train.slow_rank import Pace, slow_ranks
from hotloop.train.world import World, joined_world

MODELS = {"8B": ("llama-3-8b", {}), "70B": ("llama-3-8b", {"layers": 80, "width": 8192, "heads": 64, "hidden": 28672})}
RANKS = (1024, 8192)
_VOCABULARY, _CONTEXT = 128_256, 8192
_TIMES = {"plans": 3, "agreement": 7, "gathered": 5, "slow_ranks": 5, "connections": 5, "store": 5, "sockets": 1}
"""Processes, or sets of them, for each figure."""
_INTERRUPTIONS, _DAYS, _GPUS = 419, 54, 16_384
"""Grattafiori et al., "The Llama 3 herd of models", 2024."""
_PATIENCE = timedelta(seconds=300)

Measured = dict[str, Any]

processor_seconds = time.process_time
"""Of this process: what else runs on the machine takes none of it."""


class Peak:
    """How much more memory than before this process had at most."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._status("VmRSS")

    def bytes(self) -> int:
        return max(0, self._status("VmHWM") - self._before)

    def _status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def first_of(ranks: int) -> World:
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return World(size=ranks, group=distributed.group.WORLD)


def plans(model_name: str, ranks: int, tensor: int) -> Measured:
    world = first_of(ranks)
    shape, arguments = MODELS[model_name]
    with torch.device("meta"):
        model = build_decoder(shape, _VOCABULARY, _CONTEXT, arguments)
    weights = sum(parameter.numel() for parameter in model.parameters())
    peak, began = Peak(), processor_seconds()
    mesh = mesh_of(replace(world, tensor=tensor), "cpu")
    divide(model, mesh, Types(torch.bfloat16), layers=tensor > 1)
    divided = processor_seconds() - began
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    parts._identity = id  # tensors without memory all lie at 0
    state = {"model": model.state_dict(), "optimizer": {name: model.state_dict() for name in ("exp_avg", "exp_avg_sq")}}
    began = processor_seconds()
    split = parts.split(state)
    manifest = json.dumps(split.entries)
    planned = processor_seconds() - began
    described = {f"part-{number:05d}-of-{ranks:05d}.safetensors": described_file() for number in range(ranks)}
    return {
        "model": model_name, "weights": weights, "ranks": ranks, "tensor": tensor,
        "divide_seconds": divided, "save_plan_seconds": planned, "memory_bytes": peak.bytes(),
        "local_share": local * ranks / weights, "manifest_bytes": len(manifest) + len(json.dumps(described)),
        "tensors": len(split.entries), **resumed(split.entries, ranks),
    }  # fmt: skip


def described_file(number: int = 0) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"sha256": f"{number:064x}", "bytes": 1 << 27}


def resumed(entries: list[dict[str, Any]], ranks: int) -> Measured:
    """A rank of half as many finds its part: how long, and how many files it opens."""
    opened: set[int] = set()

    class Files(parts.PartFiles):
        def read(self, file: int, name: str, slices: Any) -> Tensor:
            opened.add(file)
            return torch.empty([one.stop - one.start for one in slices], device="meta")

    files, half = Files.__new__(Files), ranks // 2
    began = processor_seconds()
    for entry in entries:
        stored, rows = parts.StoredTensor(files, entry), entry["shape"][0]
        each = -(-rows // half)
        first = min((half // 3) * each, rows)
        stored.part((first, *[0] * (len(entry["shape"]) - 1)), (min(each, rows - first), *entry["shape"][1:]))
    return {"load_plan_seconds": processor_seconds() - began, "files_opened": len(opened)}


class Others:
    """Puts in what other ranks would send, where the fake group leaves what this one has sent.

    The fake group copies as often as gloo does. What this takes on top is in `seconds`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.reduced = torch.zeros(0)
        self._sizes, self._rows = torch.zeros(0), torch.zeros(0)
        self._reduce, self._all_gather, self._gather = (
            distributed.all_reduce, distributed_c10d.all_gather, distributed_c10d.gather,
        )  # fmt: skip
        for where, name, other in (
            (distributed, "all_reduce", self._reduced),
            (distributed_c10d, "all_gather", self._all_gathered),
            (distributed_c10d, "gather", self._gathered),
        ):
            setattr(where, name, other)

    def send(self, values: Iterable[Any]) -> None:
        """In the gatherings that come, by rank; the first one's own is to be the first of these."""
        pickled = [distributed_c10d._object_to_tensor(value, "cpu", None)[0] for value in values]
        self._sizes = torch.tensor([len(one) for one in pickled])
        self._rows = torch.nn.utils.rnn.pad_sequence(pickled, batch_first=True)
        del pickled
        ctypes.CDLL(None).malloc_trim(0)  # nothing is left from which a gathering could take its memory

    @property
    def sent_bytes(self) -> int:
        """By each."""
        return self._rows.shape[1]

    def _reduced(self, values: Tensor, **options: Any) -> Any:
        work = self._reduce(values, **options)
        with self._aside():
            values.copy_(self.reduced)
        return work

    def _all_gathered(self, outputs: list[Tensor], own: Tensor, **options: Any) -> None:
        self._all_gather(outputs, own, **options)
        self._fill(outputs)

    def _gathered(self, own: Tensor, gather_list: list[Tensor], **options: Any) -> None:
        self._gather(own, gather_list=gather_list, **options)
        self._fill(gather_list)

    def _fill(self, outputs: list[Tensor]) -> None:
        with self._aside():
            whole, given = outputs[0]._base, self._sizes if outputs[0].dtype is torch.long else self._rows
            assert whole is not None
            whole.copy_(given.view(-1))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        began = processor_seconds()
        yield
        self.seconds += processor_seconds() - began


def each_seconds(call: Callable[[], object], others: Others, number: int) -> float:
    """Mean time of a call."""
    call()
    others.seconds, began = 0.0, processor_seconds()
    for _ in range(number):
        call()
    return (processor_seconds() - began - others.seconds) / number


class Clock:
    """A step each 0.2 s: then there is a message after each, and its answer is read after the next."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def agreement(ranks: int) -> Measured:
    world, others, clock = first_of(ranks), Others(), Clock()
    peak = Peak()
    others.reduced = torch.tensor([0.0, 0.0, 1.0, -0.5], dtype=torch.float64)  # another one wants to save
    agreed = Agreement(world, clock)
    found: list[Wishes] = []

    def step() -> None:
        clock.seconds += 0.2
        found[:] = [agreed.after_step(lambda: NOTHING)]

    message = each_seconds(step, others, 2000)
    assert found[0].save, "what another rank wants is heard"
    clock.seconds -= 2000.0  # steps that seem to take no time: no message after them
    agreed = Agreement(world, clock)
    others.reduced[3] = -1000.0
    for _ in range(2):
        agreed.after_step(lambda: NOTHING)
    between = each_seconds(lambda: agreed.after_step(lambda: NOTHING), others, 900)
    others.reduced = torch.tensor([1.0], dtype=torch.float64)
    assert world.any(False)
    flag = each_seconds(lambda: world.any(False), others, 2000)
    others.reduced = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert world.any_of([False, False]) == [False, True]
    flags = each_seconds(lambda: world.any_of([False, False]), others, 2000)
    losses = [2.0] * 100
    others.reduced = torch.full([100], 2.0 * ranks, dtype=torch.float64)
    assert world.sum(losses) == [2.0 * ranks] * 100
    added = each_seconds(lambda: world.sum(losses), others, 2000)
    return {
        "ranks": ranks, "message_seconds": message, "step_between_seconds": between, "any_seconds": flag,
        "any_of_two_seconds": flags, "sum_of_100_seconds": added, "memory_bytes": peak.bytes(), "sent_bytes": 4 * 8,
    }  # fmt: skip


def paces(ranks: int) -> list[Pace]:
    """Of ranks that differ as cards do; each thousandth is slow, and another waits for data."""
    rates = (7e14 * (1 + 0.01 * np.random.default_rng(0).standard_normal(ranks))).tolist()
    found = [Pace(rate, 0.01) for rate in rates]
    for rank in range(500, ranks, 1000):
        found[rank], found[rank + 1] = Pace(4e14, 0.01), Pace(7e14, 0.5)
    return found


def random_states(ranks: int) -> Iterator[Any]:
    for rank in range(ranks):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        yield random_state()


def hashes(ranks: int) -> Iterator[Any]:
    return ({f"part-{rank:05d}-of-{ranks:05d}.safetensors": described_file(rank)} for rank in range(ranks))


SENT: dict[str, Callable[[int], Iterable[Any]]] = {
    "pace": paces,
    "hashes of a file": hashes,
    "random state": random_states,
}


def gathered(what: str, ranks: int) -> Measured:
    """Random numbers' states go to the first rank, all else to each."""
    world, others = first_of(ranks), Others()
    own = next(iter(SENT[what](ranks)))
    others.send(SENT[what](ranks))
    gather = world.gathered_on_first if what == "random state" else world.gathered
    taken = []
    peak = Peak()
    for _ in range(3):
        others.seconds, began = 0.0, processor_seconds()
        found = gather(own)
        taken.append(processor_seconds() - began - others.seconds)
        assert len(found) == len({str(one) for one in found[-2:]}) + ranks - 2, "they are of different ranks"
        del found
    return {
        "what": what, "ranks": ranks, "sent_bytes": others.sent_bytes, "received_bytes": ranks * others.sent_bytes,
        "seconds": statistics.median(taken), "memory_bytes": peak.bytes(),
    }  # fmt: skip


def compared(ranks: int) -> Measured:
    given, taken = paces(ranks), []
    peak = Peak()
    for _ in range(5):
        began = processor_seconds()
        found = slow_ranks(given)
        taken.append(processor_seconds() - began)
    expected = {(rank + more, why) for rank in range(500, ranks, 1000) for more, why in ((0, "rate"), (1, "data"))}
    assert found.keys() == expected
    return {"ranks": ranks, "seconds": statistics.median(taken), "memory_bytes": peak.bytes()}


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
    command = [sys.executable, __file__, "--part", json.dumps(["peer"])]
    peers = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    found = [json.loads(one.communicate(timeout=600)[0]) for one in peers]
    taken = [one.pop("any_seconds") for one in found]
    return {"ranks": ranks, "lazily": lazily, "first": found[0], "last": found[-1], "any_clock_seconds": taken[0]}


def store(ranks: int) -> Measured:
    """Of the store in which ranks find each other: one rank reads what gloo needs to know of all, for one group.

    Its server is a process of its own; what that computes for it is what all ranks together wait for.
    """
    each = named_bytes(ranks)
    command = [sys.executable, __file__, "--part", json.dumps(["serve"])]
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
    return {"ranks": ranks, "read_bytes": ranks * each, "read_clock_seconds": seconds, "server_seconds": served}


def named_bytes(ranks: int) -> int:
    """What gloo puts there of a rank: its host's name and address, and a number for each rank (its tcp/context.cc)."""
    return 8 * ranks + 152 + len(socket.gethostname())


def serve() -> Measured:
    served = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    print(served.port, flush=True)
    sys.stdin.readline()
    return {}


def useful() -> list[Measured]:
    """The share of time to be expected: 1 − d/τ − (τ/2 + R)/M, with τ = √(2·d·M). Nothing of it is measured."""
    found = []
    for gpus in (*RANKS, _GPUS):
        for stall in (30.0, 0.3):
            between = _DAYS * 86400 * _GPUS / _INTERRUPTIONS / gpus
            interval = math.sqrt(2 * stall * between)
            shares = {
                f"restart in {minutes} min": 1 - stall / interval - (interval / 2 + 60 * minutes) / between
                for minutes in (2, 10)
            }
            given = {"gpus": gpus, "stall_seconds": stall}
            found.append(
                {**given, "between_hours": between / 3600, "interval_minutes": interval / 60, "useful": shares}
            )
    return found


PARTS: dict[str, Callable[..., Measured]] = {
    "plans": plans, "agreement": agreement, "gathered": gathered, "slow_ranks": compared, "connections": connections,
    "store": store, "sockets": joined, "peer": peer, "serve": serve,
}  # fmt: skip
CASES: dict[str, list[tuple[Any, ...]]] = {
    "plans": [("8B", 1024, 1), ("8B", 8192, 1), ("70B", 1024, 8), ("70B", 8192, 8)],
    "agreement": [(ranks,) for ranks in (2, *RANKS)],
    "gathered": [(what, ranks) for what in SENT for ranks in RANKS],
    "slow_ranks": [(ranks,) for ranks in RANKS],
    "connections": [(16,), (32,), (64,)],
    "store": [(ranks,) for ranks in RANKS],
    "sockets": [(ranks, lazily) for lazily in (False, True) for ranks in (2, 4, 8, 16)],
}


def figures(found: list[Measured]) -> Measured:
    """What processes measured of the same; what differs between them is a figure."""
    units = {"seconds": "s", "memory_bytes": "bytes"}
    content: Measured = {}
    for name, value in found[0].items():
        unit = next((unit for end, unit in units.items() if name.endswith(end) and name != "stall_seconds"), "")
        values = [one[name] for one in found]
        assert unit or values == [value] * len(values), f"{name} is not always the same: {values}"
        values = list(chain(*values)) if isinstance(value, list) else values
        content[name] = asdict(Figure.of(values, unit)) if unit else value
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=list(CASES), help="this part; the others as recorded of the same source")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="write bench/results/scale.json")
    arguments = parser.parse_args()
    if arguments.part is not None:
        name, *given = json.loads(arguments.part)
        print(json.dumps(PARTS[name](*given)), flush=True)
        os._exit(0)  # groups whose ranks are threads of one process do not take leave of each other
    content: dict[str, Any] = {}
    for name in [arguments.only] if arguments.only else CASES:
        content[name] = []
        for case in CASES[name]:
            command = [sys.executable, __file__, "--part", json.dumps([name, *case])]
            found = []
            for _ in range(_TIMES[name]):
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
            content[name].append(figures(found))
            print(name, content[name][-1], file=sys.stderr, flush=True)
    if arguments.record:
        if arguments.only:
            known = of_this_source("scale")
            content = {**{name: known[name] for name in CASES}, **content}
        publish("scale", {**content, "useful": useful()}, arguments.json)
    else:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
