"""Kubernetes as an engine: objects that are checked, sent, looked after and taken away."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.files import write_atomic
from hotloop.launch.engine import Document
from hotloop.launch.finding import LaunchFinding
from hotloop.launch.kubernetes.checks import check_cluster
from hotloop.launch.kubernetes.client import Cluster
from hotloop.launch.kubernetes.logs import follow_logs, read_logs
from hotloop.launch.kubernetes.manifests import kind_of, manifests
from hotloop.launch.kubernetes.names import Place, object_name
from hotloop.launch.kubernetes.paths import paths_in_container
from hotloop.launch.kubernetes.pods import DEFAULT_IMAGE
from hotloop.launch.kubernetes.sending import deletion, make_objects, try_objects
from hotloop.launch.kubernetes.stand import read_status
from hotloop.launch.kubernetes.text import to_yaml
from hotloop.launch.record import Launch
from hotloop.launch.request import Request
from hotloop.launch.status import Status

_IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*?(:[\w.-]{1,128})?(@sha256:[0-9a-f]{64})?")
"""A registry's name may have a port. Source: the grammar of references in the OCI distribution specification."""
_FILE = "manifest.yaml"
_CONTEXT = "context"


class Kubernetes:
    """The cluster of kubectl's current context, or of launch.kubernetes.context.

    Args:
        connect: opens a cluster by the name of its context.
    """

    look_seconds = 2.0

    def __init__(self, connect: Callable[[str], Cluster] = Cluster) -> None:
        self._connect = connect
        self._clusters: dict[str, Cluster] = {}

    def gpus(self) -> int:
        """Nobody knows on which machines it will run."""
        raise InputError(
            "how many GPUs of each machine are wanted is not said", "machines of a cluster differ", "--gpus 8"
        )

    def check(self, request: Request) -> None:
        """That nothing is left to chance, and the cluster has and allows what is needed."""
        for finding in (_no_image(request), _not_kept(request)):
            if finding:
                raise InputError(finding.what, "that does for a dry run alone", finding.fix)
        cluster = self._cluster(request.job.launch.kubernetes.context)
        check_cluster(cluster, request, self._namespace(request), manifests(request))

    def documents(self, requests: Sequence[Request]) -> list[Document]:
        """The objects as kubectl takes them; where settings are missing, with what is named in the findings."""
        first = requests[0]
        namespace = first.job.launch.kubernetes.namespace
        objects = [one for request in requests for one in manifests(request, namespace)]
        findings = [_no_image(first), _not_kept(first), _data_elsewhere(first)]
        return [Document(_FILE, to_yaml(objects), tuple(one for one in findings if one))]

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Have the cluster check all, then make all; what was made is taken away again if that fails."""
        cluster, namespace = self._cluster(requests[0].job.launch.kubernetes.context), self._namespace(requests[0])
        launches = [manifests(request, namespace) for request in requests]
        for request, objects in zip(requests, launches, strict=True):
            write_atomic(request.folder / _FILE, to_yaml(objects))
            write_atomic(request.folder / _CONTEXT, cluster.context)
            try_objects(cluster, namespace, objects)
        make_objects(cluster, namespace, launches)
        return [str(Place(namespace, kind_of(request), object_name(request.name))) for request in requests]

    def status(self, launch: Launch) -> Status:
        """By the object that stands for it, and its pods."""
        place = Place.parse(launch.id)
        return read_status(self._cluster_of(launch), place, launch.nodes, launch.cancel_file.exists)

    def log(self, launch: Launch, follow: bool) -> Iterator[str]:
        """Of its pods; of one that was cancelled, what they had written until then."""
        place, cluster = Place.parse(launch.id), self._cluster_of(launch)
        if launch.log_file.exists() and self.status(launch).ended:
            yield launch.log_file.read_text(errors="replace")
        elif follow:
            yield from follow_logs(
                cluster, place, launch.nodes, lambda: self.status(launch).ended, self.look_seconds
            )  # fmt: skip
        else:
            yield from read_logs(cluster, place, launch.nodes)

    def cancel(self, launch: Launch) -> None:
        """Delete it: its pods are told to stop, and have their grace to save in. Their logs go with them."""
        place, cluster = Place.parse(launch.id), self._cluster_of(launch)
        with suppress(HotloopError):
            write_atomic(launch.log_file, "".join(read_logs(cluster, place, launch.nodes)))
        cluster.call("DELETE", place.path, deletion("Foreground"))

    def _cluster(self, context: str) -> Cluster:
        if context not in self._clusters:
            self._clusters[context] = self._connect(context)
        return self._clusters[context]

    def _cluster_of(self, launch: Launch) -> Cluster:
        """Where it was sent, whatever kubectl's current context is now."""
        return self._cluster((Path(launch.folder) / _CONTEXT).read_text())

    def _namespace(self, request: Request) -> str:
        own = request.job.launch.kubernetes
        return own.namespace or self._cluster(own.context).namespace


def _no_image(request: Request) -> LaunchFinding | None:
    """Raises InputError: there is one that no registry has."""
    image = request.job.launch.image
    if image and not _IMAGE.fullmatch(image):
        raise InputError(
            f'launch.image = "{image}" names no image', "it is to be REGISTRY/IMAGE:TAG, small letters up to the tag",
            "--set launch.image=registry.example/team/hotloop:1.0",
        )  # fmt: skip
    if image:
        return None
    return LaunchFinding(
        "no-image", f"there is no launch.image; {DEFAULT_IMAGE} stands in its place",
        "build one and push it, hotloop image build, then --set launch.image=REGISTRY/IMAGE:TAG",
    )  # fmt: skip


def _not_kept(request: Request) -> LaunchFinding | None:
    """One machine may fetch what it has copied to object storage; several need the same files."""
    paths = paths_in_container(request)
    if not paths.scratch or (request.job.checkpoint.copy_to and request.nodes == 1):
        return None
    return LaunchFinding(
        "run-not-kept",
        f"there are no launch.kubernetes.claims: the run lies in {paths.scratch}, which is empty at first and goes "
        "with its pod",
        "--set launch.kubernetes.claims.CLAIM=/data; on one machine --set checkpoint.copy_to=s3://BUCKET will do",
    )


def _data_elsewhere(request: Request) -> LaunchFinding | None:
    """Paths of the machine at which the job was written are not those of a container."""
    data, paths = request.job.data, paths_in_container(request)
    for key, value in (("train", data.train), ("val", data.val or "")):
        if value.startswith("/") and not paths.kept(value):
            return LaunchFinding(
                "data-outside", f'data.{key} = "{value}" lies on no claim: the image has to hold it',
                f"--set data.{key}=a path below {paths.directory}",
            )  # fmt: skip
    return None
