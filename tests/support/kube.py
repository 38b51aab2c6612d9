"""An API server of Kubernetes, as far as hotloop talks to one: addresses, objects and errors in its forms.

No controllers: tests say what becomes of what was made. Forms as in the API conventions and the OpenAPI document of
1.37; messages as kube-apiserver writes them.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kube_schemas import problems

Object = dict[str, Any]
KINDS = {
    "configmaps": "ConfigMap", "serviceaccounts": "ServiceAccount", "jobs": "Job", "jobsets": "JobSet",
    "trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime",
}  # fmt: skip
GROUPS = ("jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1", "kueue.x-k8s.io/v1beta2")
_TOKEN = "a-token"
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/(?P<version>[^/]+))/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)


@dataclass
class Log:
    """Of a pod: lines as kubelets keep them, and whether more may come."""

    lines: list[bytes] = field(default_factory=list)
    ended: bool = True
    cut_after: int | None = None
    """So many lines, then the connection breaks, once."""


@dataclass
class Refusal(Exception):
    code: int
    body: Object | str


@dataclass
class Cluster:
    """Its state, which tests set and read; `changed` is told of each change of a log."""

    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    namespaces: list[str] = field(default_factory=lambda: ["default", "team"])
    nodes: list[int] = field(default_factory=lambda: [8, 8])
    installed: set[str] = field(default_factory=lambda: set(GROUPS))
    denied: set[tuple[str, str]] = field(default_factory=set)
    quota: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """What cannot be stored, whatever a dry run says."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Fields of which it does not know, being old."""
    logs: dict[str, Log] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    deletions: list[Object] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    port: int = 0
    stopping: bool = False

    def make(self, plural: str, name: str, namespace: str = "default", **more: Any) -> Object:
        """Put an object there, as a controller does."""
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{len(self.objects)}", **more.pop("metadata", {})}
        made = {"metadata": metadata, **more}
        self.objects[plural, namespace, name] = made
        return made

    def pod(
        self, job: str, phase: str, index: int = 0, number: int = 0, namespace: str = "default", **more: Any
    ) -> str:
        """A pod of a launch; its name."""
        name = f"{job}-{index}-{number:05d}"
        status = {"phase": phase, **more}
        self.make(
            "pods", name, namespace, kind="Pod", spec={"nodeName": f"machine-{index}"}, status=status,
            metadata={
                "labels": {"app.kubernetes.io/instance": job}, "creationTimestamp": f"2026-01-01T00:00:{number:02d}Z",
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            },
        )  # fmt: skip
        return name

    def write(self, pod: str, *lines: str, ended: bool = False) -> None:
        """Have a pod write lines, a thousandth of a second apart."""
        with self.changed:
            log = self.logs.setdefault(pod, Log())
            for line in lines:
                log.lines.append(f"2026-01-01T00:00:01.{len(log.lines):09d}Z {line}".encode())
            log.ended = ended
            self.changed.notify_all()

    def condition(self, plural: str, name: str, type_: str, namespace: str = "default", **more: str) -> None:
        """What a controller says of an object."""
        status = self.objects[plural, namespace, name].setdefault("status", {})
        status.setdefault("conditions", []).append({"type": type_, "status": "True", **more})

    def collect(self) -> None:
        """What the garbage collector does once pods have ended: what is to be deleted goes, and what it owns."""
        gone = {one["metadata"]["uid"] for one in self.objects.values() if "deletionTimestamp" in one["metadata"]}
        for key, one in list(self.objects.items()):
            owners = {owner["uid"] for owner in one["metadata"].get("ownerReferences", [])}
            if one["metadata"]["uid"] in gone or owners & gone:
                del self.objects[key]

    def names(self, plural: str, namespace: str = "default") -> list[str]:
        return [name for kind, space, name in self.objects if (kind, space) == (plural, namespace)]


def _failure(code: int, reason: str, message: str, **details: Any) -> Refusal:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
              "reason": reason, **({"details": details} if details else {}), "code": code}  # fmt: skip
    return Refusal(code, status)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer, of two writes, would wait 40 ms for the other side
    cluster: Cluster

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self) -> None:
        address = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        self.cluster.requests.append(f"{self.command} {address.path}{' dry' if 'dryRun' in query else ''}")
        try:
            if self.headers.get("Authorization") != f"Bearer {_TOKEN}":
                raise _failure(401, "Unauthorized", "Unauthorized")
            match = _PATH.fullmatch(address.path)
            if match and match["log"]:
                self._log(match["name"], query)
                return
            code, answer = self._object(match, query, body) if match else self._other(address.path, body)
        except Refusal as refusal:
            code, answer = refusal.code, refusal.body
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815

    def _other(self, path: str, body: Object) -> tuple[int, Object]:
        """What belongs to no namespace."""
        cluster = self.cluster
        if path.endswith("/selfsubjectaccessreviews"):
            wanted = body["spec"]["resourceAttributes"]
            allowed = (wanted["verb"], wanted["resource"]) not in cluster.denied
            return 201, {
                **body,
                "status": {"allowed": allowed, **({} if allowed else {"reason": "no RBAC policy matched"})},
            }
        if path == "/api/v1/nodes":
            self._authorize("list", "", "nodes", "")
            nodes = [
                {"metadata": {"name": f"machine-{number}"}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}
                for number, gpus in enumerate(cluster.nodes)
            ]
            return 200, {"kind": "NodeList", "apiVersion": "v1", "items": nodes}
        if path == "/api/v1/namespaces":
            self._authorize("list", "", "namespaces", "")
            return 200, {"items": [{"metadata": {"name": name}} for name in cluster.namespaces]}
        if path.startswith("/api/v1/namespaces/"):
            self._authorize("get", "", "namespaces", "")
            name = path.rpartition("/")[2]
            if name not in cluster.namespaces:
                raise _failure(404, "NotFound", f'namespaces "{name}" not found', name=name, kind="namespaces")
            return 200, {"kind": "Namespace", "metadata": {"name": name}}
        for version in cluster.installed:
            if path == f"/apis/{version}":
                return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": []}
            if path == f"/apis/{version.partition('/')[0]}":
                return 200, {"kind": "APIGroup", "preferredVersion": {"groupVersion": version}}
        raise Refusal(404, "404 page not found\n")

    def _authorize(self, verb: str, group: str, plural: str, namespace: str) -> None:
        if (verb, plural) in self.cluster.denied:
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            kind = f"{plural}.{group}" if group else plural
            raise _failure(
                403, "Forbidden",
                f'{kind} is forbidden: User "ada" cannot {verb} resource "{plural}" in API group "{group}" {where}',
                **({"group": group} if group else {}), kind=plural,
            )  # fmt: skip

    def _object(self, match: re.Match[str], query: dict[str, str], body: Object) -> tuple[int, Object]:
        group, plural, namespace, name = match["group"] or "", match["plural"], match["namespace"], match["name"] or ""
        if "." in group and f"{group}/{match['version']}" not in self.cluster.installed:
            raise Refusal(404, "404 page not found\n")
        verb = {"POST": "create", "DELETE": "delete", "PATCH": "patch"}.get(self.command, "get" if name else "list")
        self._authorize(verb, group, plural, namespace)
        if verb == "create":
            return 201, self._create(group, plural, namespace, query, body)
        if verb == "list":
            return 200, {"items": list(self._listed(plural, namespace, query))}
        found = self.cluster.objects.get((plural, namespace, name))
        if found is None:
            kind = f"{plural}.{group}" if group else plural
            details = {"name": name, **({"group": group} if group else {}), "kind": plural}
            raise _failure(404, "NotFound", f'{kind} "{name}" not found', **details)
        if verb == "delete":
            self.cluster.deletions.append({"name": name, "plural": plural, **body})
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:10:00Z"
            if body.get("propagationPolicy") != "Foreground":
                self.cluster.collect()
        if verb == "patch":
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            found["metadata"] |= body["metadata"]
        return 200, found

    def _listed(self, plural: str, namespace: str, query: dict[str, str]) -> Iterator[Object]:
        for (kind, space, _), one in list(self.cluster.objects.items()):
            labels = one["metadata"].get("labels", {})
            key, _, value = query.get("labelSelector", "").partition("=")
            reason = query.get("fieldSelector", "").removeprefix("reason=")
            wanted = (not key or labels.get(key) == value) and (not reason or one.get("reason") == reason)
            if (kind, space) == (plural, namespace) and wanted:
                yield one

    def _create(self, group: str, plural: str, namespace: str, query: dict[str, str], body: Object) -> Object:
        """In the order of the API server: decoding, admission, validation, storage."""
        cluster, name, kind = self.cluster, body["metadata"]["name"], KINDS[plural]
        version = f"{group}/v1" if group == "batch" else body["apiVersion"]
        assert (body["kind"], body["metadata"].get("namespace")) == (kind, namespace)
        assert query["fieldValidation"] == "Strict"
        details = {"name": name, **({"group": group} if group else {}), "kind": plural}
        full = f"{plural}.{group}" if group else plural
        found = problems(body)
        unknown = [one for one in found if "Additional properties are not allowed" in one]
        if unknown := [cluster.unknown[plural]] if plural in cluster.unknown else unknown:
            raise _failure(
                400, "BadRequest", f'{kind} in version "{version.rpartition("/")[2]}" cannot be handled as a {kind}: '
                f'strict decoding error: unknown field "{unknown[0].partition(":")[0]}"',
            )  # fmt: skip
        if namespace not in cluster.namespaces:
            raise _failure(404, "NotFound", f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        if plural in cluster.quota:
            exceeded = f"exceeded quota: {cluster.quota[plural]}"
            raise _failure(403, "Forbidden", f'{full} "{name}" is forbidden: {exceeded}', **details)
        if plural == "trainjobs":
            self._check_runtime(namespace, body["spec"]["runtimeRef"]["name"])
        if found:
            fields = [one.partition(": ") for one in found]
            causes = [{"reason": "FieldValueInvalid", "message": said, "field": place} for place, _, said in fields]
            more = {**details, "kind": kind, "causes": causes}
            raise _failure(422, "Invalid", f'{kind} "{name}" is invalid: {found[0]}', **more)
        if (plural, namespace, name) in cluster.objects:
            raise _failure(409, "AlreadyExists", f'{full} "{name}" already exists', **details)
        if "dryRun" in query:
            return body
        if plural in cluster.broken:
            raise _failure(500, "InternalError", "Internal error occurred: etcdserver: request timed out")
        return cluster.make(plural, name, namespace, **{**body, "metadata": body["metadata"]})

    def _check_runtime(self, namespace: str, name: str) -> None:
        """As Kubeflow's webhook does."""
        if ("trainingruntimes", namespace, name) not in self.cluster.objects:
            raise _failure(
                403, "Forbidden",
                'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: '
                "Invalid value: specified trainingRuntime must be created before the TrainJob is created",
            )  # fmt: skip

    def _log(self, pod: str, query: dict[str, str]) -> None:
        """Chunks, as they are written."""
        cluster = self.cluster
        log = cluster.logs.get(pod)
        if log is None:
            raise _failure(400, "BadRequest", f'container "node" in pod "{pod}" is waiting to start: ContainerCreating')
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        since, sent = query.get("sinceTime", "").removesuffix("Z").encode(), 0
        while True:
            with cluster.changed:
                while len(log.lines) <= sent and not log.ended and "follow" in query and not cluster.stopping:
                    cluster.changed.wait()
                new, sent = log.lines[sent:], len(log.lines)
                ended = log.ended or "follow" not in query or cluster.stopping
                cut, log.cut_after = log.cut_after, None
            wanted = [line for line in new if line >= since][:cut]
            if data := b"".join(line + b"\n" for line in wanted):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            if cut is not None:
                self.close_connection = True
                return
            if ended:
                self.wfile.write(b"0\r\n\r\n")
                return


@contextmanager
def api_server() -> Iterator[Cluster]:
    """One that listens on this machine alone."""
    cluster = Cluster()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": cluster}))
    server.daemon_threads = False
    cluster.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="api-server")
    thread.start()
    try:
        yield cluster
    finally:
        with cluster.changed:
            cluster.stopping = True
            cluster.changed.notify_all()
        server.shutdown()
        server.server_close()
        thread.join()


def write_kubeconfig(file: Path, cluster: Cluster, namespace: str = "default", token: str = _TOKEN) -> None:
    """For kubectl and its like."""
    configuration = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{cluster.port}"}}],
        "users": [{"name": "ada", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "ada", "namespace": namespace}}],
    }  # fmt: skip
    file.write_text(json.dumps(configuration))
