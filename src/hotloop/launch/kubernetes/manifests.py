"""The objects that are sent, as plain data.

Exit codes decide what happens next, as everywhere: 75 and a machine that is taken away start it again, as often as it
takes; 2 ends it; what else fails may fail ranks.restarts times.
"""

import math
from typing import Any

from hotloop.core.errors import InputError
from hotloop.core.stopping import STOPPED_EARLY
from hotloop.core.units import count
from hotloop.launch.kubernetes.names import MAIN, NODE, RESOURCES, Kind, object_name
from hotloop.launch.kubernetes.paths import Paths, job_in_container, paths_in_container
from hotloop.launch.kubernetes.pods import labels, pod_template
from hotloop.launch.request import Request

Manifest = dict[str, Any]

_AGAIN, _NEVER = STOPPED_EARLY, 2
_TRAINER_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_QUEUE = "kueue.x-k8s.io/queue-name"


def kind_of(request: Request) -> Kind:
    """What a request becomes.

    Raises:
        InputError: a Job for several machines.
    """
    wanted = request.job.launch.kubernetes.kind
    if wanted == "auto":
        return "job" if request.nodes == 1 else "jobset"
    if wanted == "job" and request.nodes > 1:
        raise InputError(
            f'launch.kubernetes.kind = "job" for {count(request.nodes, "machine")}',
            "the pods of a Job do not know where to meet",
            "--set launch.kubernetes.kind=jobset",
        )
    return wanted


def manifests(request: Request, namespace: str = "") -> list[Manifest]:
    """All objects of a request, in the order in which they are made; the last stands for the launch.

    Args:
        namespace: of the objects; empty: that of whoever sends them.

    Raises:
        InputError: what is asked for contradicts itself.
    """
    _check_memory(request)
    name, kind, paths = object_name(request.name), kind_of(request), paths_in_container(request)
    found = [_job_file(request, name, paths)]
    if not request.job.launch.kubernetes.service_account:
        account = _object("ServiceAccount", name)
        found.append({**account, "automountServiceAccountToken": False})
    made = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[kind]
    found += made(request, name, paths)
    if queue := request.job.launch.kubernetes.queue:
        found[-1]["metadata"]["labels"][_QUEUE] = queue
    if namespace:
        for one in found:
            one["metadata"]["namespace"] = namespace
    return found


def _check_memory(request: Request) -> None:
    launch = request.job.launch
    shared, whole = launch.kubernetes.shm_gib, launch.memory_gib
    if shared != "auto" and whole != "auto" and shared >= whole:
        raise InputError(
            f"launch.kubernetes.shm_gib = {shared} is no less than launch.memory_gib = {whole}",
            "shared memory is a part of a machine's memory",
            f"--set launch.kubernetes.shm_gib={max(1, whole // 2)}, or leave it out",
        )


def _object(kind: str, name: str, **more: Any) -> Manifest:
    metadata = {"name": name, "labels": labels(name)}
    return {"apiVersion": RESOURCES[kind].version, "kind": kind, "metadata": metadata, **more}


def _job_file(request: Request, name: str, paths: Paths) -> Manifest:
    """What is changed in the user's file, or in this, after sending changes nothing."""
    text = job_in_container(request, paths).to_toml()
    return _object("ConfigMap", name, immutable=True, data={"job.toml": text})


def _job(request: Request, name: str, paths: Paths) -> list[Manifest]:
    rules = [
        {"action": "FailJob", "onExitCodes": _exit(_NEVER)},
        {"action": "Ignore", "onExitCodes": _exit(_AGAIN)},
        {"action": "Ignore", "onPodConditions": [_disrupted()]},
    ]
    spec = {
        "backoffLimit": request.job.ranks.restarts,
        "podReplacementPolicy": "Failed",  # two pods would write into one run
        "podFailurePolicy": {"rules": rules},
        **_deadline(request),
        "template": pod_template(request, name, paths, together=False),
    }
    return [_object("Job", name, spec=spec)]


def _jobset(request: Request, name: str, paths: Paths) -> list[Manifest]:
    return [_object("JobSet", name, spec=_jobset_spec(request, name, paths))]


def _trainjob(request: Request, name: str, paths: Paths) -> list[Manifest]:
    """With a runtime of its own: a TrainJob takes no pod failure policy."""
    spec = _jobset_spec(request, name, paths)
    spec["replicatedJobs"][0]["template"]["metadata"]["labels"][_TRAINER_STEP] = "trainer"
    runtime = {"mlPolicy": {"numNodes": request.nodes}, "template": {"spec": spec}}
    reference = {"apiGroup": RESOURCES["TrainingRuntime"].group, "kind": "TrainingRuntime", "name": name}
    job = {"runtimeRef": reference, "trainer": {"numNodes": request.nodes}}
    return [_object("TrainingRuntime", name, spec=runtime), _object(MAIN["trainjob"], name, spec=job)]


def _jobset_spec(request: Request, name: str, paths: Paths) -> Manifest:
    """All pods end when one does, and start together: any failure fails the child job, and what it was decides."""
    codes = [{"action": "FailJob", "onExitCodes": _exit(code)} for code in (_AGAIN, _NEVER)]
    job = {
        "parallelism": request.nodes,
        "completions": request.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [_disrupted()]}, *codes]},
        **_deadline(request),
        "template": pod_template(request, name, paths, together=True),
    }
    template = {"metadata": {"labels": labels(name)}, "spec": job}
    return {
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": request.job.ranks.restarts, "rules": _failure_rules()},
    }


def _failure_rules() -> list[Manifest]:
    """Told apart by what the Job controller writes about the pod that failed first."""
    failed = r"failed with exit code {} matching FailJob rule"
    again = [failed.format(_AGAIN), "has condition DisruptionTarget matching FailJob rule"]

    def rule(name: str, action: str, reason: str, patterns: list[str]) -> Manifest:
        which = {"onJobFailureMessagePatterns": patterns} if patterns else {}
        return {"name": name, "action": action, "onJobFailureReasons": [reason], **which}

    return [
        rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", "PodFailurePolicy", again),
        rule("badInput", "FailJobSet", "PodFailurePolicy", [failed.format(_NEVER)]),
        rule("deadline", "FailJobSet", "DeadlineExceeded", []),
    ]


def _exit(code: int) -> Manifest:
    return {"containerName": NODE, "operator": "In", "values": [code]}


def _disrupted() -> Manifest:
    return {"type": "DisruptionTarget", "status": "True"}


def _deadline(request: Request) -> Manifest:
    deadline = request.job.launch.kubernetes.deadline
    return {"activeDeadlineSeconds": math.ceil(deadline.amount)} if deadline else {}
