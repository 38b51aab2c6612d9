"""What each process that trains says of itself, in a small file of its own, for whoever watches the machine.

A step costs a look at the clock; a file is written once a second at most. Figures that grow are totals since the
process began, so nothing is lost while nobody reads. Whoever reads trusts no file: its owner, size and content are
checked. Imports the standard library alone, as `core/process.py` does: scripts run in environments of their own.
"""

import atexit
import errno
import json
import math
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from secrets import token_hex
from typing import Any

from hotloop.core.process import started

FOLDER = "HOTLOOP_LIVE"
"""The environment variable that names the folder; "off": nothing is written."""
_SHARED = Path("/run/hotloop")
"""Made by an administrator for exporters that see all users' trainings: install -d -m 1777 /run/hotloop"""
_MEMORY = Path("/dev/shm")  # noqa: S108 (`is_safe` sees to whose it is)
_FORMAT = 1
_SECONDS = 1.0
_MOST_BYTES, _MOST_METRICS, _MOST_CHARACTERS = 128 * 1024, 64, 200
_LONGEST_PATH = 4096
_MOST_FILES = 4096
_PART = re.compile(r"\d+-\d+\.[0-9a-f]{16}\.part")
_PART_SECONDS = 60.0
"""A part becomes a file at once; one that is so old is of a process that was killed before that."""
_JUMP_SECONDS = 10.0
"""By which somebody has set the wall clock; what is less is the clock's being kept right."""
_SILENT_SECONDS = 3600.0
"""A process that cannot be asked for, as it lives in another container, is taken to be gone after so long."""
PHASES = ("starting", "loading", "step", "validating", "saving", "ending")
_OF_A_STEP = frozenset({"loading", "step"})


@dataclass(frozen=True)
class Live:
    """One process that trains. Times at which something was are seconds since 1970.

    Attributes:
        pid, started: the process: its number, and when it began, in the kernel's ticks, as numbers are used again.
        namespace: of process numbers, as the kernel names it.
        way: what published it: "train", "run", "profile" or "library".
        job: a name for people: the run directory's, or the script's.
        run: the run's directory; of a script, one that tells its starts apart, or the current one; "" if none is known.
        rank, ranks: its number among the processes that train together, and how many there are.
        gpu: the UUID of the card that it trains on; "" on a CPU.
        restarts: how often the run was started again.
        begun: when this process began to train.
        phase: one of `PHASES`; "loading" and "step" take turns, and each is told once a second at most.
        heartbeat: when something was last done: a step, a batch of a validation, a save.
        step: of the run.
        steps, step_seconds, wait_seconds, samples: of this process: how many steps it has done, how long they took by
            the clock, for how long of that they waited for data, and how many samples they had.
        communication_seconds: for how long steps stood still for messages of other ranks; None where that is not known.
        loss, learning_rate: of the last logged step; None before.
        memory_bytes: allocated on the card, or resident on a CPU, at the most.
        metrics: the user's own, and a validation's.
        saves, save_seconds, stalled_seconds, saved: checkpoints that this process has written: how many, how long the
            last one took until it was whole, for how long training waited for all of them, when the last was whole.
        save_every_seconds: that checkpoints are apart, as planned; 0 where that is not by the clock.
    """

    pid: int
    started: int
    namespace: int
    way: str
    job: str
    run: str = ""
    rank: int = 0
    ranks: int = 1
    gpu: str = ""
    restarts: int = 0
    begun: float = 0.0
    phase: str = "starting"
    heartbeat: float = 0.0
    step: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    samples: int = 0
    communication_seconds: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    memory_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    saves: int = 0
    save_seconds: float = 0.0
    stalled_seconds: float = 0.0
    saved: float = 0.0
    save_every_seconds: float = 0.0


@dataclass(frozen=True)
class Seen:
    """What a look into the folder found.

    Attributes:
        processes: that train now, in order of job and rank.
        ignored: files that were left out, by reason: "foreign", "damaged" or "ended".
    """

    processes: tuple[Live, ...]
    ignored: dict[str, int]


def live_folder() -> Path | None:
    """Where processes of this user publish; None if they are not to."""
    asked = os.environ.get(FOLDER, "")
    if asked == "off":
        return None
    if asked:
        return Path(asked)
    if os.access(_SHARED, os.W_OK | os.X_OK):
        return _SHARED
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "hotloop"
    # In memory, where it can be: a second's file took 44 µs there, and 196 on a disk (ext4).
    there = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return there / f"hotloop-{os.getuid()}"


class Publisher:
    """Publishes this process. Figures are set as attributes, by the names of `Live`, and written at the next beat.

    What cannot be written is not: a training never fails for those who watch it.

    Args:
        folder: None: nothing is written.
        who: what of `Live` stays as it is.
    """

    def __init__(
        self, folder: Path | None, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time,
        **who: Any,
    ) -> None:  # fmt: skip
        self._clock, self._now = clock, now
        pid = os.getpid()
        self._live: dict[str, Any] = {
            "format": _FORMAT, **asdict(Live(pid, started(pid) or 0, namespace(), way="", job="")),
            "begun": now(), "heartbeat": now(), **who,
        }  # fmt: skip
        self._due = 0.0
        self._ahead = now() - clock()
        name = f"{pid}-{self._live['started']}"
        self._file = folder / f"{name}.json" if folder and is_safe(folder) else None
        # Nobody can lay a link or a folder there before: in a folder of all users a name that is known could be taken.
        self._part = (folder or Path()) / f"{name}.{token_hex(8)}.part"
        self._pid = pid
        _of_process.append(self)
        if folder and self._file:
            _remove_ended(folder)
            self.write()

    @property
    def due(self) -> bool:
        """Whether the next beat is written."""
        return self._clock() >= self._due

    @property
    def way(self) -> str:
        """Of training."""
        return str(self._live["way"])

    def beat(self, step: int, phase: str = "step") -> None:
        """Something was done; costs 0.3 µs, and 0.3 ms once a second."""
        if self.due:
            self._live["step"] = step
            self._tell(phase)

    def stepped(self, seconds: float, waited: float, samples: int = 0, steps: int = 1) -> None:
        """Add what steps took; does not beat."""
        live = self._live
        live["steps"] += steps
        live["step_seconds"] += seconds
        live["wait_seconds"] += waited
        live["samples"] += samples

    def saved(self, seconds: float, stalled: float) -> None:
        """A checkpoint is whole."""
        self._live["saves"] += 1
        self._live["stalled_seconds"] += stalled
        self.set(save_seconds=seconds, saved=self._moment())

    def set(self, **figures: Any) -> None:
        """Set figures by their names in `Live`."""
        self._live.update(figures)

    def enter(self, phase: str) -> None:
        """A phase has begun: written at once, but for those that each step consists of, which cost 0.3 µs.

        They are written where no beat has come for another second: steps that take long.
        """
        told = self._live["phase"]
        if phase in _OF_A_STEP and told in _OF_A_STEP and self._clock() < self._due + _SECONDS:
            return
        self._tell(phase)

    def _tell(self, phase: str) -> None:
        """A sign of life, now."""
        self._live["phase"] = phase
        self._due = self._clock() + _SECONDS
        self._live["heartbeat"] = self._moment()
        self.write()

    def _moment(self) -> float:
        """By the wall clock. If that was set, what was before is moved with it, as ages are to stay what they are."""
        now = self._now()
        jumped = now - self._clock() - self._ahead
        if abs(jumped) > _JUMP_SECONDS:
            self._ahead += jumped
            for name in ("begun", "saved"):
                self._live[name] = max(0.0, self._live[name] + jumped) if self._live[name] else 0.0
        return now

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep metrics of the user's, the newest of each name."""
        known: dict[str, float] = self._live["metrics"]
        for key, value in metrics.items():
            name = str(key)[:_MOST_CHARACTERS]
            if name in known or len(known) < _MOST_METRICS:
                known[name] = float(value)

    def write(self) -> None:
        """Write the file now."""
        if not self._file or os.getpid() != self._pid:
            return
        content = json.dumps(self._live).encode()
        try:
            _write(self._part, content, os.O_CREAT | os.O_EXCL)
            self._part.replace(self._file)
        except OSError:  # a full disk: what is there has room for what replaces it, and a training that goes on is told
            with suppress(OSError):
                self._part.unlink(missing_ok=True)
            with suppress(OSError):
                _write(self._file, content)

    def close(self) -> None:
        """Take the file away: this process trains no more."""
        if self._file and os.getpid() == self._pid:
            with suppress(OSError):
                self._file.unlink()
                self._part.unlink(missing_ok=True)
        self._file = None
        if self in _of_process:
            _of_process.remove(self)


def _write(file: Path, content: bytes, how: int = 0) -> None:
    """Over what is there, and without following a link."""
    descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | how, 0o644)
    try:
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


_of_process: list[Publisher] = []


def publish(metrics: Mapping[str, float], step: int | None = None) -> None:
    """Show figures of your own beside those of the machine: in `hotloop exporter` and wherever those are shown.

    Within a training of hotloop's, and in a script under `hotloop run`, they join what is published of it. In another
    process the first call makes it known, and each is a sign of life.

    Args:
        metrics: by name; the newest of each is kept, of at most 64.
        step: how far the training is, from 0; known where hotloop trains.

    Raises:
        ValueError: `step` is negative, or a figure is no number.
    """
    if step is not None and step < 0:
        raise ValueError(f"step is {step}: the least is 0")
    if not _of_process:
        rank, ranks = number_in_environment("RANK", 0), number_in_environment("WORLD_SIZE", 1)  # as torchrun says
        ours = Publisher(live_folder(), way="library", job=script_name(), run=str(Path.cwd()), rank=rank, ranks=ranks)
        atexit.register(ours.close)
    publisher = _of_process[-1]
    publisher.note(metrics)
    if publisher.way == "library":
        publisher.beat(step or 0)


def number_in_environment(variable: str, otherwise: int) -> int:
    """What an environment variable says, where it is a number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else otherwise


def script_name() -> str:
    """Of what this process runs: the file's, or the package's."""
    script = Path(sys.argv[0] if sys.argv else "")
    return script.parent.name if script.stem == "__main__" else script.stem or "python"


def read_live(folder: Path, proc: Path = Path("/proc"), now: Callable[[], float] = time.time) -> Seen:
    """The processes that train now. Costs about 40 µs a file; never raises for what a file holds.

    Raises:
        OSError: the folder is there and cannot be read.
    """
    found, ignored = [], {"foreign": 0, "damaged": 0, "ended": 0}
    here = _Processes(proc)
    for file in _files(folder):
        try:
            live = _read(file, here)
        except (OSError, ValueError, OverflowError, RecursionError):
            if file.exists():  # and has not just ended
                ignored["damaged"] += 1
            continue
        if live is None:
            ignored["foreign"] += 1
        elif _is_alive(live, file, here, now):
            found.append(live)
        else:
            ignored["ended"] += 1
    return Seen(tuple(sorted(found, key=lambda live: (live.job, live.run, live.rank, live.pid))), ignored)


def _files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".json")]
    except (FileNotFoundError, NotADirectoryError):  # nobody has published yet
        return []
    return [folder / name for name in sorted(names)[:_MOST_FILES]]


class _Processes:
    """Those that have a number here; one look into the folder asks once which numbers these are."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.proc, self.namespace = proc, namespace(proc)


def _read(file: Path, here: _Processes) -> Live | None:
    """What a file holds; None if it belongs to somebody else than the process does."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size > _MOST_BYTES:
            raise ValueError("no file of ours")
        if os.geteuid() not in (0, state.st_uid):
            return None
        content = json.loads(os.read(descriptor, _MOST_BYTES))
    finally:
        os.close(descriptor)
    live = _live(content)
    with suppress(OSError):
        if live.namespace == here.namespace and os.stat(f"{here.proc}/{live.pid}").st_uid != state.st_uid:
            return None
    return live


def _live(content: Any) -> Live:
    """Checked, and cut to size.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError("of another version")
    live = Live(run=_path(content.get("run")), **{name: read(content.get(name)) for name, read in _FIELDS})
    if live.phase not in PHASES or not all(0 <= getattr(live, name) <= _MOST for name in _COUNTS):
        raise ValueError("nothing that a training tells")
    return live


def _number(value: object) -> float:
    try:
        if isinstance(value, (int, float)) and math.isfinite(value):
            return value
    except OverflowError:
        pass
    raise ValueError(f"{value!r:.40} is no number")


def _number_or_none(value: object) -> float | None:
    """A loss may be none yet, or infinite."""
    return _number(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def printable(text: str, most: int = _MOST_CHARACTERS) -> str:
    """The beginning of what somebody else wrote, without what would steer a terminal."""
    cut = text[:most]
    return cut if cut.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in cut)


def _words(value: object, most: int = _MOST_CHARACTERS) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return printable(value, most)


def _path(value: object) -> str:
    return _words(value, _LONGEST_PATH)


def _metrics(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("no metrics")
    read = {_words(name): _number_or_none(each) for name, each in list(value.items())[:_MOST_METRICS]}
    return {name: each for name, each in read.items() if each is not None}


_READERS: dict[Any, Callable[[object], Any]] = {
    int: lambda value: int(_number(value)), float: lambda value: float(_number(value)), float | None: _number_or_none,
    str: _words, dict[str, float]: _metrics,
}  # fmt: skip
_FIELDS = [(one.name, _READERS[one.type]) for one in fields(Live) if one.name != "run"]
_COUNTS = [one.name for one in fields(Live) if one.type in (int, float)]
_MOST = 2.0**63


def _is_alive(live: Live, file: Path, here: _Processes, now: Callable[[], float]) -> bool:
    if live.namespace == here.namespace:
        return started(live.pid, here.proc) == live.started
    with suppress(OSError):
        return abs(now() - file.stat().st_mtime) < _SILENT_SECONDS
    return False


def namespace(proc: Path = Path("/proc")) -> int:
    """Of the process numbers that are seen here; 0 where the kernel does not tell."""
    try:
        return (proc / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def is_safe(folder: Path) -> bool:
    """Whether the folder is there, made if need be, and nobody else can put something in its place."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return False
    shared = state.st_uid == 0 and state.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(state.st_mode) and bool(state.st_uid == os.getuid() or shared)


def _remove_ended(folder: Path) -> None:
    """What processes of this user have left that were killed."""
    here, files = _Processes(), list[Path]()
    with suppress(OSError):
        files = _files(folder)
    for file in files:
        with suppress(OSError, ValueError, OverflowError, RecursionError):
            if file.stat().st_uid == os.getuid():
                live = _read(file, here)
                if live and not _is_alive(live, file, here, time.time):
                    file.unlink()
    _remove_old_parts(folder)


def _remove_old_parts(folder: Path) -> None:
    """By age: what they hold may be cut off, and whether a number is a process of this container is not in a name."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _PART.fullmatch(entry.name):
                with suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if state.st_uid == os.getuid() and time.time() - state.st_mtime > _PART_SECONDS:
                        os.unlink(entry.path)
