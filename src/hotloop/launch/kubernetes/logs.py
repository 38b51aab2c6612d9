"""What pods write, joined: with several machines each line begins with the machine's number."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from hotloop.core.errors import HotloopError
from hotloop.launch.kubernetes.client import Cluster
from hotloop.launch.kubernetes.names import NODE, Place
from hotloop.launch.kubernetes.refusals import Refused
from hotloop.launch.kubernetes.stand import index_of, pods_of

_LOOK_SECONDS = 0.3


def read_logs(cluster: Cluster, place: Place, nodes: int) -> Iterator[str]:
    """What there is of all pods, the first start's first."""
    for pod in pods_of(cluster, place):
        yield from _Reader(cluster, place, pod, nodes).read()


def follow_logs(
    cluster: Cluster, place: Place, nodes: int, ended: Callable[[], bool], look_seconds: float
) -> Iterator[str]:
    """What there is and what is added, of later starts too, until `ended`; empty pieces while nothing comes."""
    pieces: SimpleQueue[str] = SimpleQueue()
    readers: dict[str, threading.Thread] = {}
    stop = threading.Event()
    asked, last = -look_seconds, False
    try:
        while True:
            if not last and time.monotonic() - asked >= look_seconds:
                last = ended()  # before the pods: what is there at the end is read whole
                for pod in pods_of(cluster, place):
                    uid = pod["metadata"]["uid"]
                    if uid not in readers and pod["status"].get("phase") in ("Running", "Succeeded", "Failed"):
                        reader = _Reader(cluster, place, pod, nodes, stop)
                        readers[uid] = threading.Thread(target=reader.follow, args=(pieces,), name=f"log-{uid}")
                        readers[uid].daemon = True
                        readers[uid].start()
                asked = time.monotonic()
            try:
                yield pieces.get(timeout=_LOOK_SECONDS)
            except Empty:
                if last and not any(thread.is_alive() for thread in readers.values()) and pieces.empty():
                    return
                yield ""
    finally:
        stop.set()


@dataclass
class _Reader:
    """Of one pod.

    Attributes:
        stop: set when nobody reads on.
    """

    cluster: Cluster
    place: Place
    pod: dict[str, Any]
    nodes: int
    stop: threading.Event = field(default_factory=threading.Event)
    _seen: bytes = b""  # time of the last line

    def read(self) -> Iterator[str]:
        """What there is."""
        try:
            yield from self._lines(follow=False)
        except Refused:  # it has not begun, or its machine is gone
            return

    def follow(self, pieces: "SimpleQueue[str]") -> None:
        """Until the pod has ended; a connection that breaks is made again, and no line comes twice."""
        failures = 0
        while not self.stop.is_set() and failures < 3:
            try:
                for text in self._lines(follow=True):
                    failures = 0
                    pieces.put(text)
                    if self.stop.is_set():
                        return
                if not self._is_running():
                    return
            except HotloopError:  # gone, or out of reach for a moment
                failures += 1
                self.stop.wait(_LOOK_SECONDS)

    def _lines(self, follow: bool) -> Iterator[str]:
        name = self.pod["metadata"]["name"]
        path = f"/api/v1/namespaces/{self.place.namespace}/pods/{name}/log"
        query = {"container": NODE, "timestamps": "true", **({"follow": "true"} if follow else {})}
        if self._seen:  # sinceTime knows whole seconds alone
            query["sinceTime"] = self._seen.decode().partition(".")[0].rstrip("Z") + "Z"
        prefix = f"{index_of(self.pod)}: " if self.nodes > 1 else ""
        for line in self.cluster.lines(path, query):
            stamp, _, text = line.partition(b" ")
            if stamp <= self._seen:
                continue
            self._seen = stamp
            yield f"{prefix}{text.decode(errors='replace')}\n"

    def _is_running(self) -> bool:
        path = f"/api/v1/namespaces/{self.place.namespace}/pods/{self.pod['metadata']['name']}"
        found = self.cluster.call("GET", path)
        return bool(found["status"].get("phase") == "Running")
