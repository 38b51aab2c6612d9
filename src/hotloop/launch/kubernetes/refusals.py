"""What an API server answers to what it does not do, in three lines.

Errors are objects of kind Status ("API Conventions", response status kind); addresses that it does not know give plain
text.
"""

import json
from typing import Any

from hotloop.core.errors import HotloopError, InputError

_INSTALL = {
    "jobset.x-k8s.io": (
        "JobSet",
        "kubectl apply --server-side -f "
        "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml",
    ),
    "trainer.kubeflow.org": (
        "Kubeflow Trainer",
        "helm install kubeflow-trainer oci://ghcr.io/kubeflow/charts/kubeflow-trainer --version 2.3.0 "
        "--namespace kubeflow-system --create-namespace",
    ),
    "kueue.x-k8s.io": ("Kueue", "https://kueue.sigs.k8s.io/docs/installation, or leave out launch.kubernetes.queue"),
}
"""API group -> what brings it, and how it is installed."""


class Refused(HotloopError):
    """The cluster has answered with an error.

    Attributes:
        code: of HTTP.
    """

    def __init__(self, code: int, what: str, cause: str, fix: str) -> None:
        super().__init__(what, cause, fix)
        self.code = code
        if code < 500 and code != 429:
            self.exit_code = InputError.exit_code


def not_installed(group: str) -> InputError:
    """The cluster knows nothing of an API group."""
    name, how = _INSTALL[group]
    return InputError(f"the cluster has no {name}", f"it does not know {group}", f"whoever runs it: {how}")


def refused(method: str, path: str, code: int, text: str) -> HotloopError:
    """Why a request has failed."""
    status = _status(text)
    said = " ".join(str(status.get("message") or text).split())[:500] or f"HTTP {code}"
    root, _, rest = path.partition("/namespaces/")
    namespace, _, kind = rest.partition("/")
    group = root.removeprefix("/apis/").partition("/")[0] if root.startswith("/apis/") else ""
    name = str(status.get("details", {}).get("name") or kind.partition("/")[2])
    if code == 404 and group in _INSTALL and not status.get("details", {}).get("name"):
        return Refused(code, *not_installed(group).args)
    what, fix = _words(method, code, said, status, namespace, kind.partition("/")[0], name)
    if code == 400 and "unknown field" in said:
        what, fix = _too_old(group, kind)
    return Refused(code, what, said, fix)


def _too_old(group: str, plural: str) -> tuple[str, str]:
    """Who does not know a field that hotloop sets, and what to do."""
    if group not in _INSTALL:
        return f"the cluster does not know a field of {plural}", "a cluster of Kubernetes 1.30 or newer"
    name, how = _INSTALL[group]
    return f"the cluster's {name} is too old", f"whoever runs it: {how}"


def _words(
    method: str, code: int, said: str, status: dict[str, Any], namespace: str, plural: str, name: str
) -> tuple[str, str]:  # fmt: skip
    """What happened, and what to do."""
    other = "another launch.kubernetes.namespace"
    if code == 401:
        return "the cluster does not accept your login", "log in again as it wants it, and see: kubectl auth whoami"
    if code == 403 and "exceeded quota" in said:
        return (
            f"the quota of namespace {namespace} does not allow it",
            f"fewer --gpus or --nodes, or {other}; kubectl describe quota --namespace {namespace}",
        )
    if code == 403:
        verb = {"GET": "see", "POST": "create", "DELETE": "delete", "PATCH": "change"}[method]
        return (
            f"you may not {verb} {plural or 'that'} in namespace {namespace or '(none)'}",
            f"ask whoever runs the cluster, or {other}; kubectl auth can-i --list --namespace {namespace}",
        )
    if code == 404 and status.get("details", {}).get("kind") == "namespaces":
        return f"there is no namespace {name}", f"kubectl get namespaces; {other}"
    if code == 404:
        return f"there is no {plural.removesuffix('s')} {name} in namespace {namespace}", "hotloop launch status"
    if code == 409:
        return (
            f"the name {name} is taken in namespace {namespace}",
            f"another run.dir, {other}, or: kubectl delete {plural} {name} --namespace {namespace}",
        )
    if code in (400, 422):
        causes = [one.get("field", "") for one in status.get("details", {}).get("causes", [])]
        return (
            f"the cluster does not take {', '.join(filter(None, causes)) or plural}",
            "change what it names; hotloop launch ... --dry-run shows what is sent",
        )
    return f"the cluster answers with {code}", "try again later"


def _status(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("kind") == "Status" else {}
