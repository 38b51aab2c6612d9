"""How a launch stands, in the words of all engines, by what the cluster's controllers and kubelets write."""

from collections.abc import Callable
from typing import Any

from hotloop.core.units import count
from hotloop.launch.ending import error_in
from hotloop.launch.kubernetes.client import Cluster, asked
from hotloop.launch.kubernetes.names import INSTANCE, NODE, RESOURCES, Place
from hotloop.launch.kubernetes.refusals import Refused
from hotloop.launch.status import Status

_INDEX = "batch.kubernetes.io/job-completion-index"
_STARTING = ("ContainerCreating", "PodInitializing")
_FINISHED = ("Complete", "Completed")  # of a Job and a TrainJob; of a JobSet


def read_status(cluster: Cluster, place: Place, nodes: int, cancelled: Callable[[], bool]) -> Status:
    """How it stands.

    Args:
        nodes: machines of it.
        cancelled: whether we have had it stop.
    """
    try:
        main = cluster.call("GET", place.path)
    except Refused as error:
        if error.code != 404:
            raise
        if cancelled():
            return Status("cancelled")
        return Status("lost", f"the cluster has no {place.kind} {place.name} in namespace {place.namespace}")
    status = main.get("status", {})
    true = {one["type"]: one for one in status.get("conditions", []) if one["status"] == "True"}
    pods = pods_of(cluster, place)
    starts = _starts(cluster, place, status)
    if any(kind in true for kind in _FINISHED):
        return Status("finished", starts=starts)
    if "Failed" in true:
        return Status("failed", _why_failed(true["Failed"], pods), starts=starts)
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    hosts = ",".join(dict.fromkeys(pod["spec"].get("nodeName", "") for pod in running))
    if "deletionTimestamp" in main["metadata"]:
        return Status("running", "it is to save and stop", hosts, starts)
    pending = [pod for pod in pods if pod["status"].get("phase") == "Pending"]
    why = next(filter(None, map(_why_pending, pending)), "")
    if running:
        missing = f"{count(nodes - len(running), 'machine')} of {nodes} to come: {why}" if why else ""
        return Status("running", missing, hosts, starts)
    if main["spec"].get("suspend"):
        queue = main["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        return Status("waiting", f"in Kueue's queue {queue}" if queue else "suspended", starts=starts)
    return Status("waiting", why or ("" if pending else _why_no_pods(cluster, place)), starts=starts)


def pods_of(cluster: Cluster, place: Place) -> list[dict[str, Any]]:
    """All that the cluster still knows of: the first start's first, within it by the machine's number."""
    path = f"/api/v1/namespaces/{place.namespace}/pods"
    items: list[dict[str, Any]] = cluster.call("GET", path, query={"labelSelector": f"{INSTANCE}={place.name}"})[
        "items"
    ]
    return sorted(items, key=lambda pod: (pod["metadata"].get("creationTimestamp") or "", index_of(pod)))


def index_of(pod: dict[str, Any]) -> int:
    """The number of the machine; 0 where there is but one."""
    return int(pod["metadata"].get("annotations", {}).get(_INDEX, 0))


def _starts(cluster: Cluster, place: Place, status: dict[str, Any]) -> int:
    """A JobSet tells how often all were started again, a Job does not: what it ignores it does not count."""
    if place.kind == "job":
        return 0
    if place.kind == "trainjob":  # its JobSet has its name
        try:
            found = asked(cluster, RESOURCES["JobSet"].path(place.namespace, place.name))
        except Refused:
            found = None
        status = (found or {}).get("status", {})
    return int(status["restarts"]) + 1 if "restarts" in status else 0


def _why_failed(condition: dict[str, Any], pods: list[dict[str, Any]]) -> str:
    """By the last pod that has left word; by the controller, if none has."""
    if condition.get("reason") == "DeadlineExceeded":
        return "it met launch.kubernetes.deadline; what it had saved is there"
    for pod in reversed(pods):
        for container in pod["status"].get("containerStatuses", []):
            ended = container.get("state", {}).get("terminated", {})
            if ended.get("reason") == "OOMKilled":
                return "out of memory; raise launch.memory_gib"
            if ended.get("exitCode") and (said := error_in(ended.get("message", ""))):
                return said
    return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))


def _why_pending(pod: dict[str, Any]) -> str:
    """What a pod waits for, in words of the scheduler or the kubelet; empty: it is being started."""
    for container in pod["status"].get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting and waiting.get("reason") not in _STARTING:
            return ": ".join(filter(None, (waiting.get("reason"), waiting.get("message"))))
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
    return ""


def _why_no_pods(cluster: Cluster, place: Place) -> str:
    """What the controller that makes them says it cannot do: a quota, a policy."""
    path = f"/api/v1/namespaces/{place.namespace}/events"
    there = asked(cluster, path, {"fieldSelector": "reason=FailedCreate"}) or {"items": []}
    names = (place.name, f"{place.name}-{NODE}-0")  # of a JobSet, its child job makes them
    ours = [one for one in there["items"] if one["involvedObject"]["name"] in names]
    return str(ours[-1].get("message", "")) if ours else ""
