"""What a cluster can be asked before anything is sent to it."""

from typing import Any

from hotloop.core.errors import InputError
from hotloop.core.units import count
from hotloop.launch.kubernetes.client import Cluster, asked
from hotloop.launch.kubernetes.manifests import Manifest
from hotloop.launch.kubernetes.names import resource_of
from hotloop.launch.kubernetes.pods import GPU
from hotloop.launch.kubernetes.refusals import Refused, not_installed
from hotloop.launch.request import Request

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_KUEUE = "kueue.x-k8s.io"


def check_cluster(cluster: Cluster, request: Request, namespace: str, objects: list[Manifest]) -> None:
    """Raise InputError for what the cluster does not have or does not allow.

    What one may not ask is left to the sending.
    """
    _check_namespace(cluster, namespace)
    _check_kinds(cluster, objects)
    _check_rights(cluster, namespace, objects)
    _check_queue(cluster, namespace, request.job.launch.kubernetes.queue)
    for claim in request.job.launch.kubernetes.claims:
        _check_claim(cluster, namespace, claim, request.nodes)
    if request.gpus:
        _check_machines(cluster, request)
        _check_quota(cluster, request, namespace)


def _check_namespace(cluster: Cluster, namespace: str) -> None:
    try:
        asked(cluster, f"/api/v1/namespaces/{namespace}")
    except Refused as error:
        if error.code != 404:
            raise
        there = asked(cluster, "/api/v1/namespaces") or {"items": []}
        names = ", ".join(one["metadata"]["name"] for one in there["items"]) or "unknown"
        raise InputError(
            f"there is no namespace {namespace}", f"namespaces: {names}", "--set launch.kubernetes.namespace=NAME"
        ) from None


def _check_kinds(cluster: Cluster, objects: list[Manifest]) -> None:
    for version in dict.fromkeys(resource_of(one).version for one in objects if "." in resource_of(one).group):
        try:
            cluster.call("GET", f"/apis/{version}")
        except Refused as error:
            if error.code != 404:
                raise
            raise not_installed(version.partition("/")[0]) from None


def _check_rights(cluster: Cluster, namespace: str, objects: list[Manifest]) -> None:
    main = resource_of(objects[-1])
    wanted = [(resource_of(one).group, resource_of(one).plural, "create") for one in objects]
    wanted += [(resource_of(one).group, resource_of(one).plural, "patch") for one in objects[:-1]]
    wanted += [(main.group, main.plural, verb) for verb in ("get", "delete")]
    wanted += [("", "pods", "list")]
    for group, plural, verb in wanted:
        attributes = {"namespace": namespace, "group": group, "resource": plural, "verb": verb}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                  "spec": {"resourceAttributes": attributes}}  # fmt: skip
        answer = cluster.call("POST", _REVIEWS, review)["status"]
        if not answer["allowed"]:
            raise InputError(
                f"you may not {verb} {plural} in namespace {namespace}",
                answer.get("reason") or "no role of yours allows it",
                "ask whoever runs the cluster, or --set launch.kubernetes.namespace=NAME; "
                f"kubectl auth can-i --list --namespace {namespace}",
            )


def _check_queue(cluster: Cluster, namespace: str, queue: str) -> None:
    if not queue:
        return
    try:
        version = cluster.call("GET", f"/apis/{_KUEUE}")["preferredVersion"]["groupVersion"]
    except Refused as error:
        if error.code != 404:
            raise
        raise not_installed(_KUEUE) from None
    path = f"/apis/{version}/namespaces/{namespace}/localqueues"
    there = asked(cluster, path)
    names = [one["metadata"]["name"] for one in there["items"]] if there else [queue]
    if queue not in names:
        raise InputError(
            f'launch.kubernetes.queue = "{queue}" does not exist in namespace {namespace}',
            f"queues: {', '.join(names) or 'none'}",
            f"--set launch.kubernetes.queue={names[0] if names else ''}",
        )


def _check_claim(cluster: Cluster, namespace: str, claim: str, nodes: int) -> None:
    there = asked(cluster, f"/api/v1/namespaces/{namespace}/persistentvolumeclaims")
    if there is None:
        return
    claims: dict[str, Any] = {one["metadata"]["name"]: one for one in there["items"]}
    if claim not in claims:
        raise InputError(
            f"there is no claim {claim} in namespace {namespace}",
            f"claims: {', '.join(claims) or 'none'}",
            f"--set launch.kubernetes.claims.{next(iter(claims), 'NAME')}=/data",
        )
    modes = claims[claim]["spec"].get("accessModes", [])
    if nodes > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
        raise InputError(
            f"{count(nodes, 'machine')} cannot mount claim {claim}",
            f"it is {', '.join(modes)}",
            "a claim that is ReadWriteMany, or --nodes 1",
        )


def _check_machines(cluster: Cluster, request: Request) -> None:
    """None with GPUs is no error: some clusters add machines when they are wanted."""
    selector = ",".join(f"{key}={value}" for key, value in request.job.launch.kubernetes.node_selector.items())
    there = asked(cluster, "/api/v1/nodes", {"labelSelector": selector} if selector else None)
    sizes = [int(one["status"].get("allocatable", {}).get(GPU, 0)) for one in there["items"]] if there else []
    most = max(sizes, default=0)
    if 0 < most < request.gpus:
        raise InputError(
            f"{count(request.gpus, 'GPU')} of a machine are asked for; the largest has {most}",
            f"by the cluster's list of nodes{f', those with {selector}' if selector else ''}",
            f"--gpus {most}, and more --nodes",
        )


def _check_quota(cluster: Cluster, request: Request, namespace: str) -> None:
    """What all together may have, however much of it is in use now."""
    from kubernetes.utils.quantity import parse_quantity  # 1000 may be written as 1k

    there = asked(cluster, f"/api/v1/namespaces/{namespace}/resourcequotas")
    wanted = request.nodes * request.gpus
    for quota in there["items"] if there else []:
        limit = quota["spec"].get("hard", {}).get(f"requests.{GPU}")
        if limit is not None and parse_quantity(limit) < wanted:
            raise InputError(
                f"{count(wanted, 'GPU')} are asked for; the quota of namespace {namespace} is {limit}",
                f"ResourceQuota {quota['metadata']['name']}: requests.{GPU}",
                "fewer --gpus or --nodes, or --set launch.kubernetes.namespace=NAME",
            )
