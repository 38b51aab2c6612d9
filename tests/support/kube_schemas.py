"""What an API server checks of the objects that it is sent: fields, types, names, quantities, a few rules between."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate import utils
from referencing import Registry, Resource

VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
_CRDS = {"JobSet": "jobset", "TrainingRuntime": "trainingruntime", "TrainJob": "trainjob"}
_QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")


def problems(manifest: dict[str, Any], version: str = VERSIONS[-1]) -> list[str]:
    """What a server of that version would refuse, each with its field."""
    kind = manifest["kind"]
    validator = _custom(kind) if kind in _CRDS else _builtin(f"{kind.lower()}-{_suffix(manifest)}", version)
    found = [_words(error) for error in validator.iter_errors(manifest)]
    for path, template in _job_templates(manifest):
        whole = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": template.get("metadata", {}),
            "spec": template["spec"],
        }
        if kind != "Job":
            found += [f"{path}.{_words(error)}" for error in _builtin("job-batch-v1", version).iter_errors(whole)]
        found += [f"{path}.{one}" for one in _of_job(template["spec"])]
    return [*found, *_of_metadata(manifest)]


def _suffix(manifest: dict[str, Any]) -> str:
    group, _, version = manifest["apiVersion"].rpartition("/")
    return f"{group.partition('.')[0]}-{version}" if group else version


def _words(error: Any) -> str:
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


@cache
def _builtin(name: str, version: str) -> Draft202012Validator:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    return Draft202012Validator(utils.schema_contents(f"{folder}/{name}.json", version), registry=_definitions(version))


@cache
def _definitions(version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    contents = utils.schema_contents(f"{folder}/_definitions.json", version)
    return Registry().with_resources([(contents["$id"], Resource.from_contents(contents))])


@cache
def _custom(kind: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((Path(__file__).parent / "crds" / f"{_CRDS[kind]}.json").read_text()))


def _job_templates(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where in it the template of a batch/v1 Job is."""
    if manifest["kind"] == "Job":
        yield "", manifest
    spec = manifest.get("spec", {})
    spec = spec["template"]["spec"] if manifest["kind"] == "TrainingRuntime" else spec
    for number, one in enumerate(spec.get("replicatedJobs", [])):
        yield f"spec.replicatedJobs[{number}].template", one["template"]


def _of_metadata(manifest: dict[str, Any]) -> Iterator[str]:
    metadata = manifest["metadata"]
    labelled = manifest["kind"] in ("Job", "JobSet", "TrainJob")  # their names become hosts and labels
    if not (_DNS_LABEL if labelled else _DNS_NAME).fullmatch(metadata["name"]) or len(metadata["name"]) > 253:
        yield f"metadata.name: Invalid value: {metadata['name']!r}"
    for key, value in metadata.get("labels", {}).items():
        if not _LABEL_VALUE.fullmatch(value):
            yield f"metadata.labels.{key}: Invalid value: {value!r}"


def _of_job(spec: dict[str, Any]) -> Iterator[str]:
    """Of validation.go of the batch and core groups: what schemas do not say."""
    pod = spec["template"]["spec"]
    names = [one["name"] for one in pod["containers"]]
    if "podFailurePolicy" in spec:
        if pod["restartPolicy"] != "Never":
            yield "spec.template.spec.restartPolicy: only Never goes with a podFailurePolicy"
        if spec.get("podReplacementPolicy", "Failed") != "Failed":
            yield "spec.podReplacementPolicy: only Failed goes with a podFailurePolicy"
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if ("onPodConditions" in rule) == (codes is not None):
                yield "spec.podFailurePolicy.rules: exactly one of onExitCodes and onPodConditions"
            if codes and (codes["operator"] not in ("In", "NotIn") or 0 in codes["values"]):
                yield "spec.podFailurePolicy.rules.onExitCodes: operator or values"
            if codes and codes.get("containerName", names[0]) not in names:
                yield "spec.podFailurePolicy.rules.onExitCodes.containerName: no such container"
            if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
                yield "spec.podFailurePolicy.rules.action: Unsupported value"
    volumes = [one["name"] for one in pod.get("volumes", [])]
    if len(set(volumes)) < len(volumes):
        yield "spec.template.spec.volumes: Duplicate value"
    yield from (f"volumes: {name!r} is no DNS label" for name in volumes if not re.fullmatch(r"[a-z0-9-]{1,63}", name))
    for container in pod["containers"]:
        yield from _of_container(container, volumes)


def _of_container(container: dict[str, Any], volumes: list[str]) -> Iterator[str]:
    if not container["image"] or container["image"] != container["image"].strip():
        yield "image: Required value"
    for mount in container["volumeMounts"]:
        if mount["name"] not in volumes:
            yield f"volumeMounts: Not found: {mount['name']!r}"
        if ":" in mount["mountPath"] or not mount["mountPath"]:
            yield f"volumeMounts.mountPath: {mount['mountPath']!r}"
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    if len(set(places)) < len(places):
        yield "volumeMounts.mountPath: must be unique"
    variables = [one["name"] for one in container["env"]]
    if len(set(variables)) < len(variables):
        yield "env: Duplicate value"
    resources = container.get("resources", {})
    for values in resources.values():
        yield from (f"resources.{key}: {value!r}" for key, value in values.items() if not _is_quantity(value))
        yield from (f"resources.{key}: must be a standard resource type or fully qualified" for key in values
                    if "/" not in key and key not in ("cpu", "memory"))  # fmt: skip
    for key, value in resources.get("limits", {}).items():
        if "/" in key and resources.get("requests", {}).get(key, value) != value:
            yield f"resources.{key}: of extended resources as much is asked for as limited"


def _is_quantity(value: object) -> bool:
    return isinstance(value, str) and bool(_QUANTITY.fullmatch(value))
