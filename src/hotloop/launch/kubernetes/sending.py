"""Objects made in a cluster: all that were asked for, or none."""

from collections.abc import Sequence
from contextlib import suppress

from hotloop.core.errors import HotloopError
from hotloop.launch.kubernetes.client import MERGE_PATCH, Cluster
from hotloop.launch.kubernetes.manifests import Manifest
from hotloop.launch.kubernetes.names import resource_of

_STRICT = {"fieldValidation": "Strict"}
"""A field that the cluster does not know is an error, and not left out."""


def try_objects(cluster: Cluster, namespace: str, objects: Sequence[Manifest]) -> None:
    """Have the cluster check all that it would check, and keep nothing.

    Raises:
        Refused: it does not take one.
    """
    for one in objects:
        if one["kind"] != "TrainJob":  # it is refused for as long as its runtime is not there
            cluster.call("POST", resource_of(one).path(namespace), one, {**_STRICT, "dryRun": "All"})


def make_objects(cluster: Cluster, namespace: str, launches: Sequence[Sequence[Manifest]]) -> None:
    """Make all of all launches; what was made is deleted again if one fails.

    Raises:
        Refused: the cluster does not take one.
    """
    made: list[str] = []
    try:
        for objects in launches:
            _make(cluster, namespace, objects, made)
    except BaseException:
        for path in reversed(made):
            with suppress(HotloopError):
                cluster.call("DELETE", path, deletion("Background"))
        raise


def _make(cluster: Cluster, namespace: str, objects: Sequence[Manifest], made: list[str]) -> None:
    """Make those of one launch. The last one comes to own the others, which go with it.

    Args:
        made: paths of what was made are added to it.
    """
    begin = len(made)
    for one in objects:
        path = resource_of(one).path(namespace)
        answer = cluster.call("POST", path, one, _STRICT)
        made.append(f"{path}/{answer['metadata']['name']}")
    owner = {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": one["metadata"]["name"]}
    owned = {"metadata": {"ownerReferences": [{**owner, "uid": answer["metadata"]["uid"]}]}}
    for path in made[begin:-1]:
        cluster.call("PATCH", path, owned, content=MERGE_PATCH)


def deletion(propagation: str) -> Manifest:
    """How an object goes: in the foreground it stays until all that it owns has gone."""
    return {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
