"""A cluster, through the official client; what is sent is plain data, so that no model of it drops anything."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotloop.core.errors import HotloopError, InputError
from hotloop.launch.kubernetes.refusals import Refused, refused

_SECONDS = (5.0, 30.0)
"""To connect, and for an answer."""
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MERGE_PATCH = "application/merge-patch+json"


class Cluster:
    """One that answers to whoever is logged in here.

    Args:
        context: of kubectl's configuration; empty: the current one, or the cluster that this pod runs in.

    Attributes:
        context: its name; empty in a pod.
        namespace: the context's.

    Raises:
        InputError: the client is not installed, or no cluster is configured.
    """

    def __init__(self, context: str = "") -> None:
        self._client, self.context, self.namespace = _connected(context)

    def call(
        self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None, content: str = ""
    ) -> dict[str, Any]:
        """Send a request; the object that comes back.

        Args:
            content: type of the body, where it is not plain JSON.

        Raises:
            Refused: the cluster answers with an error.
            HotloopError: it does not answer.
        """
        with self._answer(method, path, body, query, content, _SECONDS) as answer:
            data = answer.read()
            if answer.status >= 300:
                raise refused(method, path, answer.status, data.decode(errors="replace"))
            found: dict[str, Any] = json.loads(data)
            return found

    def lines(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        """What a path gives, line by line, for as long as it is written; ends early if the connection does.

        Raises:
            Refused: the cluster answers with an error.
            HotloopError: it does not answer.
        """
        from urllib3.exceptions import HTTPError

        with self._answer("GET", path, None, query, "", (_SECONDS[0], None)) as answer:
            if answer.status >= 300:
                raise refused("GET", path, answer.status, answer.read().decode(errors="replace"))
            rest = b""
            try:
                for piece in answer.stream(1 << 16, decode_content=False):
                    *whole, rest = (rest + piece).split(b"\n")
                    yield from whole
            except HTTPError:  # proxies end connections that are open for long
                return
            if rest:
                yield rest

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None, content: str, timeout: Any
    ) -> Iterator[Any]:
        """The raw one, of urllib3.

        Raises:
            HotloopError: there is none.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "application/json", "Content-Type": content or "application/json"}
        request = self._client.param_serialize(
            method, path, query_params=list((query or {}).items()), header_params=headers, body=body,
            auth_settings=["BearerToken"],
        )  # fmt: skip
        try:
            answer = self._client.call_api(*request, _request_timeout=timeout).response
        except (HTTPError, ApiException) as error:
            said = " ".join(str(getattr(error, "reason", None) or error).split())
            raise HotloopError(
                f"the cluster at {self._client.configuration.host} does not answer", said, "kubectl cluster-info"
            ) from None
        try:
            yield answer
        finally:
            answer.close()


def _connected(context: str) -> tuple[Any, str, str]:
    """The client, the context's name and its namespace."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise InputError(
            "Kubernetes needs its Python client", "it is not installed here", 'pip install "hotloop[kubernetes]"'
        ) from None
    files = os.environ.get("KUBECONFIG") or None
    try:
        contexts, current = config.list_kube_config_contexts(files)
        chosen = next((one for one in contexts if one["name"] == context), None) if context else current
        if chosen is None:
            names = ", ".join(one["name"] for one in contexts)
            raise InputError(
                f'launch.kubernetes.context = "{context}" does not exist', f"there are {names}",
                f"--set launch.kubernetes.context={current['name']}",
            )  # fmt: skip
        made = config.new_client_from_config(files, chosen["name"])
        return made, chosen["name"], chosen["context"].get("namespace") or "default"
    except config.ConfigException as error:
        if not context and "KUBERNETES_SERVICE_HOST" in os.environ and _POD_NAMESPACE.exists():
            settings = client.Configuration()
            config.load_incluster_config(settings)
            return client.ApiClient(settings), "", _POD_NAMESPACE.read_text().strip()
        raise InputError(
            "no Kubernetes cluster is configured here", " ".join(str(error).split()),
            "install kubectl, log in as your cluster wants it, and see: kubectl config get-contexts",
        ) from None  # fmt: skip


def asked(cluster: Cluster, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """An object that not everybody may see; None where one may not.

    Raises:
        Refused: otherwise.
    """
    try:
        return cluster.call("GET", path, query=query)
    except Refused as error:
        if error.code == 403:
            return None
        raise
