"""Names that Kubernetes takes, made of those of launches; and what is called how there."""

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

Kind = Literal["job", "jobset", "trainjob"]

NODE = "node"
"""The replicated job and its container; Kubeflow's trainer knows them by this name."""
INSTANCE = "app.kubernetes.io/instance"
"""Label of everything that belongs to a launch."""
_LONGEST = 45
"""Pods of a JobSet are NAME-node-0-INDEX-xxxxx, of 63 characters at most, INDEX of up to four."""


@dataclass(frozen=True)
class Resource:
    """A kind of object.

    Attributes:
        version: group and version; of the core group the version alone.
        plural: as in addresses.
    """

    version: str
    plural: str

    @property
    def group(self) -> str:
        """Empty: the core group."""
        return self.version.rpartition("/")[0]

    def path(self, namespace: str, name: str = "") -> str:
        """Of all of them in a namespace, or of one."""
        root = f"/apis/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}{f'/{name}' if name else ''}"


RESOURCES: dict[str, Resource] = {
    "ConfigMap": Resource("v1", "configmaps"),
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "Job": Resource("batch/v1", "jobs"),
    "JobSet": Resource("jobset.x-k8s.io/v1alpha2", "jobsets"),
    "TrainingRuntime": Resource("trainer.kubeflow.org/v1alpha1", "trainingruntimes"),
    "TrainJob": Resource("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
"""Kind -> where such objects are."""
MAIN: dict[Kind, str] = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}
"""What stands for a launch: with it all else of the launch goes."""


def resource_of(manifest: dict[str, Any]) -> Resource:
    """Of an object that is sent."""
    return RESOURCES[manifest["kind"]]


@dataclass(frozen=True)
class Place:
    """Where a launch is in a cluster; as text, the launch's id."""

    namespace: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read what `str` gives."""
        namespace, kind, name = text.split("/")
        known: dict[str, Kind] = {one: one for one in MAIN}
        return cls(namespace, known[kind], name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.kind}/{self.name}"

    @property
    def path(self) -> str:
        """Of the object."""
        return RESOURCES[MAIN[self.kind]].path(self.namespace, self.name)


def object_name(text: str) -> str:
    """A name for objects, pods and a service: letters, digits and -, first a letter (RFC 1035).

    Names that differ stay different: what had to be changed ends with a checksum.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = plain if re.match("[a-z]", plain) else f"run-{plain}".rstrip("-")
    if name == text and len(name) <= _LONGEST:
        return name
    mark = sha256(text.encode()).hexdigest()[:6]
    return f"{name[: _LONGEST - len(mark) - 1].rstrip('-')}-{mark}"
