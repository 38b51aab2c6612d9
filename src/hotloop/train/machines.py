"""The machines that train one model together: where they meet, and what they tell each other besides what ranks do.

That one has ended for good, or starts its ranks again, is told through a small store on the first machine; else the
others would wait for it as long as for one that is slow to come.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hotloop.core.errors import HotloopError

_HEARD_SECONDS, _LOOK_SECONDS = 5.0, 0.05
"""For so long the first machine keeps its last word there for others."""
_CONNECT_SECONDS, _ANSWER_SECONDS = 1.0, 30.0


@dataclass(frozen=True)
class Nodes:
    """The machines, and where they meet.

    Attributes:
        rank: the number of this one, from 0.
        host: of the first machine, which all others reach.
        port: there, for what machines tell each other; ranks meet at the next one, and after each restart at the one
            after that, as what the ranks before have left may hold theirs.
        id: the same on all machines, and another one for each start of the job.
    """

    number: int = 1
    rank: int = 0
    host: str = "localhost"
    port: int = 0
    id: str = "hotloop"

    def place(self, restart: int) -> str:
        """Where ranks meet."""
        return f"{self.host}:{self.port + 1 + restart}"

    def meeting(self, restart: int, timeout_seconds: float) -> dict[str, Any]:
        """Of a start, in words of torchrun's LaunchConfig."""
        name = f"{self.id}-{restart}"
        if self.number == 1:
            return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": name, "local_addr": "localhost"}
        where = {"rdzv_backend": "static", "rdzv_endpoint": self.place(restart), "run_id": name}
        return {**where, "rdzv_configs": {"rank": self.rank, "timeout": timeout_seconds}}


ONE = Nodes()


@dataclass(frozen=True)
class End:
    """A machine will not train on.

    Attributes:
        code: its exit code.
        told: whether it has said so; else it cannot be reached any more.
    """

    code: int
    text: str
    told: bool = True


class _Asking:
    """Asks in a thread: of a machine that has lost its power the kernel waits a quarter of an hour for an answer
    (tcp_retries2), and the store's client with it. https://docs.kernel.org/networking/ip-sysctl.html
    """

    def __init__(self) -> None:
        self._questions: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[tuple[Any, Exception | None]]]] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="hotloop-machines-asked", daemon=True)
        self._unanswered: SimpleQueue[tuple[Any, Exception | None]] | None = None

    def start(self) -> None:
        """Before the first question."""
        self._thread.start()

    @property
    def is_waiting(self) -> bool:
        """Whether a question had no answer in time, and has none so far."""
        return self._unanswered is not None and self._unanswered.empty()

    def ask(self, question: Callable[[], Any], seconds: float) -> Any:
        """Its answer. Nothing more is asked before a late one has come.

        Raises:
            DistError: the store's.
            TimeoutError: there was none in time, or there is none to an earlier one.
        """
        if self.is_waiting:
            raise TimeoutError
        self._unanswered = None
        answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._questions.put((question, answers))
        try:
            answer, error = answers.get(timeout=seconds)
        except Empty:
            self._unanswered = answers
            raise TimeoutError from None
        if error:
            raise error
        return answer

    def end(self) -> None:
        """Let the thread end; one that still waits is left."""
        self._questions.put((_end, SimpleQueue()))
        if self._thread.is_alive():
            self._thread.join(_CONNECT_SECONDS)

    def _run(self) -> None:
        while True:
            question, answers = self._questions.get()
            if question is _end:
                return
            try:
                answers.put((question(), None))
            except Exception as error:
                answers.put((None, error))


def _end() -> None:
    """No question."""


class Machines:
    """What they tell each other; a context manager. One machine alone tells nothing.

    An error that leaves the block is told as this machine's end.

    Args:
        limit_seconds: for which the first machine is waited for.
    """

    def __init__(self, nodes: Nodes, limit_seconds: float) -> None:
        self._nodes = nodes
        self._limit = timedelta(seconds=limit_seconds)
        self._joining: threading.Thread | None = None
        self._closed = threading.Event()
        self._store: Store | None = None
        self._asking = _Asking()
        self._is_cut_off = False
        self._told = False
        self._end: End | None = None

    def __enter__(self) -> "Machines":
        """Open the store, or begin to look for it.

        Raises:
            HotloopError: the port is taken.
        """
        if self._nodes.number == 1:
            return self
        self._asking.start()
        if self._nodes.rank:
            self._joining = threading.Thread(target=self._join, name="hotloop-machines", daemon=True)
            self._joining.start()
            return self
        try:
            self._store = self._connected(first=True)
        except (DistError, RuntimeError) as error:
            raise HotloopError(
                f"port {self._nodes.port} of this machine cannot be used", next(iter(str(error).splitlines()), ""),
                "another port in --rdzv-endpoint, on all machines",
            ) from error  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, HotloopError):
            self.tell(End(error.exit_code, error.what))
        if self._joining:
            self._closed.set()
            self._joining.join(_HEARD_SECONDS)
            self._set(f"left-{self._nodes.rank}", "")
        elif self._told:
            self._wait_for_others()
        self._asking.end()

    def restarts(self) -> Iterator[int]:
        """0, 1, 2, ...: of starts, without those that other machines have left behind."""
        restart = 0
        while True:
            yield restart
            restart += 1
            while self.is_ahead(restart):
                restart += 1

    def begin(self, restart: int) -> None:
        """This machine starts its ranks, for the so-manieth time after the first."""
        self._set(f"start-{restart}", "")

    def tell(self, end: End) -> None:
        """This machine ends; the first word counts."""
        self._told = True
        if not self._has("end"):
            self._set("end", json.dumps(asdict(end)))

    def over(self) -> End | None:
        """Whether one has ended for good, and will not come to where ranks meet."""
        text = "" if self._end else self._asked(lambda store: store.get("end") if store.check(["end"]) else b"")
        if text:
            self._end = End(**json.loads(text))
        if self._end:
            return self._end
        return End(1, "the first machine is not there any more", told=False) if self._is_lost else None

    @property
    def has_ended(self) -> bool:
        """Whether one has said that it ends: who has not, may have been lost, and others may still hang."""
        end = self.over()
        return end is not None and end.told

    def is_ahead(self, restart: int) -> bool:
        """Whether another one has started its ranks once more than this one."""
        return self._has(f"start-{restart + 1}")

    def progress(self, here: bool) -> int | None:
        """How often machines have told that their ranks have made progress; None without a store to ask.

        Args:
            here: those of this one have, since it was last asked.
        """
        told: int | None = self._asked(lambda store: store.add("progress", int(here)))
        return told

    def ask_reports(self, restart: int, own: str, seconds: float) -> list[str]:
        """What ranks of the other machines are at, of those that say so within that time, in order of machine.

        Args:
            own: what this machine's are at, for others that ask.
        """
        self._set(f"reports-{restart}", "")
        self.report(restart, own)
        until = time.monotonic() + seconds
        keys = [f"report-{restart}-{each}" for each in range(self._nodes.number) if each != self._nodes.rank]
        while not all(self._has(key) for key in keys) and time.monotonic() < until and not self._is_lost:
            time.sleep(_LOOK_SECONDS)
        return [text for key in keys if self._has(key) and (text := self._text(key))]

    def are_asked(self, restart: int) -> bool:
        """Whether one has asked for reports of ranks of that start."""
        return self._has(f"reports-{restart}")

    def report(self, restart: int, text: str) -> None:
        """What ranks of this machine are at."""
        self._set(f"report-{restart}-{self._nodes.rank}", text)

    def _text(self, key: str) -> str:
        return (self._asked(lambda store: store.get(key)) or b"").decode()

    def _join(self) -> None:
        if self._is_open():  # who never comes is told of where ranks meet
            with suppress(DistError, RuntimeError):
                self._store = self._connected(first=False)
                self._set(f"here-{self._nodes.rank}", "")

    def _is_open(self) -> bool:
        """Whether the first machine has opened its store, before the limit and this one's end.

        The store's own way of looking for it cannot be ended; and where it gives up while Python ends, the process is
        aborted: a thread in C++ that wants the interpreter then is unwound through what may not throw.
        https://docs.python.org/3.11/c-api/init.html#c.PyEval_RestoreThread
        """
        until = time.monotonic() + self._limit.total_seconds()
        while time.monotonic() < until and not self._closed.wait(_LOOK_SECONDS):
            with suppress(OSError), socket.create_connection((self._nodes.host, self._nodes.port), _CONNECT_SECONDS):
                return True
        return False

    def _connected(self, first: bool) -> Store:
        nodes = self._nodes
        store = TCPStore(nodes.host, nodes.port, is_master=first, timeout=self._limit, wait_for_workers=False)
        return PrefixStore(nodes.id, store)

    def _set(self, key: str, value: str) -> None:
        self._asked(lambda store: store.set(key, value))

    def _has(self, key: str) -> bool:
        return bool(self._asked(lambda store: store.check([key])))

    @property
    def _is_lost(self) -> bool:
        """Whether the first machine has gone, or is silent: suspended, or behind a network that does not work now."""
        return self._is_cut_off or self._asking.is_waiting

    def _asked(self, question: Callable[[Store], Any]) -> Any:
        """None before there is a store, and while it is lost."""
        if self._store and not self._is_cut_off:
            try:
                return self._asking.ask(partial(question, self._store), _ANSWER_SECONDS)
            except TimeoutError:
                return None
            except DistError:
                self._is_cut_off = True
        return None

    def _wait_for_others(self) -> None:
        until, others = time.monotonic() + _HEARD_SECONDS, range(1, self._nodes.number)
        here = [rank for rank in others if self._has(f"here-{rank}")]
        while not all(self._has(f"left-{rank}") for rank in here) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
