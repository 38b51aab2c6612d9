"""Dumps of torch's flight recorder, one of each rank: which collective they hang in, and who did not come.

torch writes them where a collective times out (TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT), as pickles;
they are read here without anything but plain values.
"""

import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.core.errors import InputError
from hotloop.explain.causes import causes
from hotloop.explain.report import Explained

_MAGIC = b"\x80"
"""That pickles of protocol 2 and later begin with."""
_MOST_BYTES = 256 << 20
_SIZES_DIFFER = re.compile(r"gather|scatter|all_?to_?all|barrier")
"""Collectives whose ranks may give tensors of different sizes."""
_FIX = "hotloop explain nccl_trace_rank_*"


@dataclass(frozen=True)
class Call:
    """A collective as one rank called it."""

    number: int
    name: str
    sizes: str
    dtypes: str
    line: str
    done: bool

    @property
    def words(self) -> str:
        """What was called, where."""
        return " ".join(filter(None, [self.name, self.dtypes, self.sizes, f"at {self.line}" if self.line else ""]))


@dataclass(frozen=True)
class Dump:
    """What one rank recorded.

    Attributes:
        groups: of ranks, by name.
        calls: of each group, by number.
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    calls: Mapping[str, Mapping[int, Call]]


def is_dump(path: Path) -> bool:
    """Whether a file begins as a dump does. What is no file, a pipe say, is left as it is: it can be read once."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(1) == _MAGIC
    except OSError:
        return False


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no dump does")


def read_dump(path: Path) -> Dump:
    """One rank's; its number is the last one in the file's name.

    Raises:
        InputError: the file is none, or is named otherwise.
    """
    number = re.search(r"(\d+)(?=\D*$)", path.name)
    if not number:
        raise InputError(f"{path} has no number in its name", "it tells the rank", _FIX)
    if not path.is_file():
        raise InputError(f"cannot read {path}", "there is no such file", _FIX)
    if path.stat().st_size > _MOST_BYTES:
        raise InputError(f"{path} is too large for a dump", f"the limit is {_MOST_BYTES >> 20} MiB", _FIX)
    try:
        with path.open("rb") as file:
            raw = _Plain(file).load()
        groups = {
            name or "0": tuple(map(int, json.loads(group["ranks"]))) for name, group in raw.get("pg_config", {}).items()
        }
        calls: dict[str, dict[int, Call]] = {}
        for entry in raw["entries"]:
            if not entry["is_p2p"]:
                call = _call(entry)
                # Groups of one dimension of a mesh have the same description; their ids differ.
                calls.setdefault(" ".join(dict.fromkeys(map(str, entry["process_group"]))), {})[call.number] = call
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"{path} is no dump of the flight recorder", str(error) or type(error).__name__, _FIX
        ) from None
    return Dump(int(number[1]), groups, calls)


def _call(entry: Mapping[str, Any]) -> Call:
    frames = [frame for frame in entry.get("frames", ()) if "/torch/" not in frame["filename"]]
    line = f"{Path(frames[0]['filename']).name}:{frames[0]['line']}" if frames else ""
    sizes = ", ".join(str(size) for size in entry["input_sizes"])
    done = entry["state"] == "completed"
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    return Call(int(entry["collective_seq_id"]), name, sizes, ", ".join(entry["input_dtypes"]), line, done)


def compared(dumps: Sequence[Dump]) -> list[Explained]:
    """What the ranks' dumps tell together; nothing where all ended what they began."""
    groups = {name: None for dump in dumps for name in dump.calls}
    of = {name: {dump.rank: dump.calls[name] for dump in dumps if name in dump.calls} for name in groups}
    differing = {name: found for name, calls in of.items() if (found := _mismatch(name, calls))}
    waiting = [_missing(name, calls, dumps) for name, calls in of.items() if name not in differing]
    return [*differing.values(), *filter(None, waiting)]


def _mismatch(group: str, of: Mapping[int, Mapping[int, Call]]) -> Explained | None:
    """The first number under which ranks called different things."""
    first = max(min(calls) for calls in of.values())
    last = min(max(calls) for calls in of.values())
    for number in range(first, last + 1):
        here = {rank: calls[number] for rank, calls in of.items() if number in calls}
        if len({_compared(call) for call in here.values()}) > 1:
            usual = Counter(map(_compared, here.values())).most_common(1)[0][0]
            odd = [rank for rank, call in here.items() if _compared(call) != usual]
            even = [rank for rank in here if rank not in odd]
            notes = [f"collective {number} of {group}: {_ranks(even)}: {here[even[0]].words}"]
            notes += [f"rank {rank}: {here[rank].words}" for rank in odd]
            return _told("collective-mismatch", notes)
    return None


def _compared(call: Call) -> tuple[str, str, str]:
    return call.name, "" if _SIZES_DIFFER.search(call.name) else call.sizes, call.dtypes


def _missing(group: str, of: Mapping[int, Mapping[int, Call]], dumps: Sequence[Dump]) -> Explained | None:
    """Ranks that have not come as far as others, or have left no dump."""
    last = {rank: max(calls) for rank, calls in of.items()}
    most = max(last.values())
    waiting = [rank for rank, number in last.items() if number == most]
    behind = {rank: number for rank, number in last.items() if number < most}
    in_it = of[waiting[0]][most]
    asked = {rank for dump in dumps for name, ranks in dump.groups.items() for rank in ranks if _same(name, group)}
    absent = sorted(asked - of.keys())
    where = f"{_ranks(waiting)} wait in collective {most} of {group}: {in_it.words}"
    if in_it.done:  # the dumps were written a moment apart
        return None
    if behind:
        notes = [where]
        for rank, number in behind.items():
            notes.append(f"rank {rank} did not come: its last one was {number}, {of[rank][number].words}")
        return _told("nccl-timeout", notes)
    if absent:
        return _told("rank-died", [where, f"{_ranks(absent)} left no dump"])
    if all(not calls[most].done for calls in of.values()):
        return _told(
            "nccl-network", [f"all ranks are in collective {most} of {group}: {in_it.words}; none has left it"]
        )
    return None


def _same(name: str, group: str) -> bool:
    """A group is called by its id and its description; the whole world's id is 0."""
    return group == name or group.startswith(f"{name} ")


def _ranks(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(map(str, found))}"


def _told(id_: str, notes: Sequence[str]) -> Explained:
    cause = causes()[id_]
    return Explained(id_, cause.title, cause.area, 0.9, (), tuple(notes), (), cause.why, cause.fix)
