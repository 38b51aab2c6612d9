"""A pod that trains: `hotloop train` in a container that may do nothing else."""

import math
from pathlib import PurePosixPath
from typing import Any

from hotloop import __version__
from hotloop.core.job import KubernetesSection
from hotloop.launch.fruitless import STARTS
from hotloop.launch.kubernetes.names import INSTANCE, NODE
from hotloop.launch.kubernetes.paths import HOME, JOB_FOLDER, Paths
from hotloop.launch.request import FOLDER, Request

JOB_FILE = f"{JOB_FOLDER}/job.toml"
DEFAULT_IMAGE = f"hotloop:{__version__}"
GPU = "nvidia.com/gpu"
_PORT = 29500
_RESTART = "jobset.sigs.k8s.io/restart-attempt"
"""Annotation that JobSet gives its pods: how often all were started again."""


def labels(name: str) -> dict[str, str]:
    """Of all objects of a launch, pods too."""
    return {"app.kubernetes.io/name": "hotloop", "app.kubernetes.io/managed-by": "hotloop", INSTANCE: name}


def pod_template(request: Request, name: str, paths: Paths, together: bool) -> dict[str, Any]:
    """What each pod is made of.

    Args:
        name: of the launch's objects.
        together: whether it is one of a JobSet's, which meet where the first is.
    """
    own = request.job.launch.kubernetes
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(own.grace.amount),
        "serviceAccountName": own.service_account or name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Not as process 1, for which a SIGTERM before hotloop listens would be lost.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": own.user, "runAsGroup": own.user, "fsGroup": own.user,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": dict(own.node_selector),
        "tolerations": _tolerations(request),
        "priorityClassName": own.priority,
        "imagePullSecrets": [{"name": own.pull_secret}] if own.pull_secret else [],
        "containers": [_container(request, name, paths, together)],
        "volumes": _volumes(own, name, paths),
    }  # fmt: skip
    return {
        "metadata": {"labels": labels(name)},
        "spec": {key: value for key, value in spec.items() if value not in ("", [], {})},
    }


def _container(request: Request, name: str, paths: Paths, together: bool) -> dict[str, Any]:
    launch = request.job.launch
    fixed = [("tmp", "/tmp"), ("home", HOME), ("shm", "/dev/shm")]  # noqa: S108 - of the container
    places = [*fixed, *((volume, place) for volume, place, _ in _kept(paths))]
    return {
        "name": NODE,
        "image": launch.image or DEFAULT_IMAGE,
        "command": _command(request, name, together),
        "workingDir": paths.directory,
        "env": _environment(request, name, paths, together),
        "resources": _resources(request),
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True},
            *({"name": volume, "mountPath": place} for volume, place in places),
        ],
    }  # fmt: skip


def _command(request: Request, name: str, together: bool) -> list[str]:
    """Kubernetes puts variables in place of $(NAME)."""
    words = ["hotloop", "train", JOB_FILE]
    if together and request.nodes > 1:
        where = f"{name}-{NODE}-0-0.{name}:{_PORT}"
        words += ["--nnodes", str(request.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        words += ["--rdzv-endpoint", where, "--rdzv-id", f"{name}-$(HOTLOOP_RESTART)"]
    if not request.job.launch.setup:
        return words
    script = "\n".join([*request.job.launch.setup, 'exec "$@"'])
    return ["/bin/bash", "-c", _literal(script), "setup", *words]


def _literal(text: str) -> str:
    """Text in which Kubernetes replaces nothing."""
    return text.replace("$", "$$")


def _environment(request: Request, name: str, paths: Paths, together: bool) -> list[dict[str, Any]]:
    """Ours, then those of the job, which come first where both set one; secrets by reference."""
    restart = ", restart $(HOTLOOP_RESTART)" if together else ""
    given = {"USER": "hotloop", "HOME": HOME, "TORCHINDUCTOR_CACHE_DIR": f"{HOME}/.cache/torchinductor"}
    given |= request.environment
    found: dict[str, dict[str, Any]] = {"HOTLOOP_POD": _from_pod("metadata.name")}
    if together:
        found["HOTLOOP_RESTART"] = _from_pod(f"metadata.annotations['{_RESTART}']")
    found["HOTLOOP_LAUNCHED"] = {"value": f"kubernetes {name}{restart}, pod $(HOTLOOP_POD)"}
    if paths.claims:  # what lies elsewhere goes with the pod
        found[STARTS] = {"value": _literal(str(PurePosixPath(paths.run_dir).parent / FOLDER / name / "starts.json"))}
    found |= {key: {"value": _literal(value)} for key, value in given.items()}
    for key, reference in request.job.launch.kubernetes.secrets.items():
        secret, _, entry = reference.partition("/")
        found[key] = {"valueFrom": {"secretKeyRef": {"name": secret, "key": entry}}}
    return [{"name": key, **value} for key, value in found.items()]


def _from_pod(field: str) -> dict[str, Any]:
    return {"valueFrom": {"fieldRef": {"fieldPath": field}}}


def _resources(request: Request) -> dict[str, dict[str, str]]:
    """Processors are asked for and not limited: what is left of a machine's may be used."""
    launch = request.job.launch
    limits = {name: str(number) for name, number in launch.kubernetes.resources.items()}
    if request.gpus:
        limits[GPU] = str(request.gpus)
    if launch.memory_gib != "auto":
        limits["memory"] = f"{launch.memory_gib}Gi"
    requests = {**({} if launch.cpus == "auto" else {"cpu": str(launch.cpus)}), **limits}
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def _tolerations(request: Request) -> list[dict[str, str]]:
    texts = [*([GPU] if request.gpus else []), *request.job.launch.kubernetes.tolerations]
    return [_toleration(text) for text in dict.fromkeys(texts)]


def _toleration(text: str) -> dict[str, str]:
    """KEY, KEY=VALUE or KEY=VALUE:EFFECT, as kubectl writes taints."""
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **how, **({"effect": effect} if effect else {})}


def _volumes(own: KubernetesSection, name: str, paths: Paths) -> list[dict[str, Any]]:
    size = {} if own.shm_gib == "auto" else {"sizeLimit": f"{own.shm_gib}Gi"}
    return [
        {"name": "job", "configMap": {"name": name}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", **size}},
        *({"name": volume, **source} for volume, _, source in _kept(paths)),
    ]


def _kept(paths: Paths) -> list[tuple[str, str, dict[str, Any]]]:
    """Volume, where it is mounted, and what it is; names of claims may be longer than those of volumes."""
    if paths.scratch:
        return [("scratch", paths.scratch, {"emptyDir": {}})]
    return [
        (f"claim-{number}", place, {"persistentVolumeClaim": {"claimName": claim}})
        for number, (claim, place) in enumerate(paths.claims.items())
    ]
