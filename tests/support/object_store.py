"""A real S3 server on this machine: SeaweedFS, with everything in one temporary folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ports import free_ports

KEY, SECRET = "testkey", "testsecret123"
PORTS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
    "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip


def program() -> str | None:
    """Where it is installed; None if it is not."""
    return shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def credentials(user: str) -> dict[str, str]:
    """Of a user of `object_store`, as an environment."""
    return {"AWS_ACCESS_KEY_ID": f"{user}key", "AWS_SECRET_ACCESS_KEY": f"secret-of-{user}"}


@contextmanager
def object_store(
    folder: Path, policies: Mapping[str, Any] | None = None, tls: bool = False
) -> Iterator[tuple[dict[str, str], "subprocess.Popen[bytes]"]]:
    """The environment that clients need, and the server's process.

    Args:
        policies: of users besides the administrator; objects are encrypted with any key that is named.
        tls: by HTTPS, with a certificate that SSL_CERT_FILE knows; by HTTP as well, which HTTP_URL names.
    """
    found = program()
    assert found
    identity = {"name": "admin", "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"]}  # fmt: skip
    (folder / "data").mkdir(parents=True)
    users = [
        {"name": name, "actions": [], "policyNames": [name],
         "credentials": [{"accessKey": given["AWS_ACCESS_KEY_ID"], "secretKey": given["AWS_SECRET_ACCESS_KEY"]}]}
        for name in policies or {} for given in [credentials(name)]
    ]  # fmt: skip
    written = [{"name": name, "content": json.dumps(policy)} for name, policy in (policies or {}).items()]
    kms = {"default_provider": "local", "providers": {"local": {"type": "local", "enableOnDemandCreate": True}}}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity, *users], "policies": written, "kms": kms}))
    names = (*PORTS, "s3.port.https") if tls else PORTS
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    secured = []
    if tls:
        from certificates import certificates

        authority, certificate, key = certificates(folder)
        secured = [f"-s3.cert.file={certificate}", f"-s3.key.file={key}"]
    # As many volumes as the buckets of all tests want: by itself it allows what the free disk holds, and then refuses.
    command = [
        found, "-logtostderr=true", "mini", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false",
        "-volume.preStopSeconds=0", "-volume.max=1000", f"-s3.config={folder}/s3.json",
        f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock",
        *(f"-{name}={port}" for name, port in ports.items()), *secured,
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    url = f"http://127.0.0.1:{ports['s3.port']}"
    try:
        wait_for(f"{url}/healthz", process, folder / "log")
        given = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        if tls:
            https = f"https://localhost:{ports['s3.port.https']}"
            yield {**given, "AWS_ENDPOINT_URL": https, "SSL_CERT_FILE": str(authority), "HTTP_URL": url}, process
        else:
            yield {**given, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}, process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for port in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the object store did not start: {log.read_text()[-2000:]}")


def bucket(name: str) -> Any:
    """A new bucket of the server that the environment names."""
    from obstore.store import S3Store

    make_bucket(name)
    return S3Store(name, client_options={"allow_http": True})


def make_bucket(name: str) -> None:
    """As obstore has nothing for it."""
    ask("PUT", f"/{name}")


def set_bucket_policy(name: str, policy: dict[str, Any]) -> None:
    """What a bucket itself allows and denies, whoever asks."""
    ask("PUT", f"/{name}", "policy=", json.dumps(policy).encode())


def ask(method: str, path: str, query: str = "", body: bytes = b"") -> None:
    """Send a request that the administrator has signed."""
    import datetime
    import hashlib
    import hmac

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    now = datetime.datetime.now(datetime.UTC)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": endpoint.split("//")[1], "x-amz-content-sha256": digest, "x-amz-date": stamp}
    signed = ";".join(headers)
    listed = "".join(f"{key}:{value}\n" for key, value in headers.items())
    canonical = f"{method}\n{path}\n{query}\n{listed}\n{signed}\n{digest}"
    scope = f"{day}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{SECRET}".encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    how = f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={signed}, Signature={signature}"
    request = urllib.request.Request(
        f"{endpoint}{path}{'?' if query else ''}{query}", body or None, {**headers, "Authorization": how}, method=method
    )
    urllib.request.urlopen(request, timeout=10).close()
