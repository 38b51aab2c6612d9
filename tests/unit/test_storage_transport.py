"""Stores are reached by new enough a TLS, or not at all: real handshakes with servers on this machine."""

import ssl
from pathlib import Path

import pytest
from certificates import certificates
from https import Proxy, http_server, https_server

pytest.importorskip("obstore", reason="pip install 'hotloop[s3]'")

from hotloop.core.errors import InputError
from hotloop.core.job_file import parse_job
from hotloop.data.object_store import open_store
from hotloop.storage.places import find_places
from hotloop.storage.transport import endpoint, reach, require_storage


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    open_store.cache_clear()
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_ALLOW_HTTP", "SSL_CERT_FILE", "HTTPS_PROXY", "https_proxy")
    for name in (*names, "AWS_REGION", "AWS_DEFAULT_REGION", "GOOGLE_BASE_URL", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return certificates(tmp_path_factory.mktemp("certificates"))


def required(monkeypatch: pytest.MonkeyPatch, address: str, **storage: str) -> None:
    open_store.cache_clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    require_storage(parse_job({"data": {"train": "s3://b/x"}, "model": {"name": "m"}, "storage": storage}, "job"))


def test_a_store_of_tls_1_2_is_refused_unless_that_is_wanted(
    made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(made[0]))
    with https_server(*made[1:], newest=ssl.TLSVersion.TLSv1_2) as address:
        with pytest.raises(InputError, match=r"does not speak TLS 1\.3") as refused:
            required(monkeypatch, address)
        assert "storage.tls=1.2" in refused.value.fix
        required(monkeypatch, address, tls="1.2")
    with https_server(*made[1:]) as address:
        required(monkeypatch, address)
        place = find_places(parse_job({"data": {"train": "s3://b/x"}, "model": {"name": "m"}}, "job"))[0]
        assert reach(place, address, "1.2") == "TLSv1.3", "the newest that both have"


def test_a_certificate_of_nobody_is_refused(made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with https_server(*made[1:]) as address, pytest.raises(InputError, match="not to be trusted") as refused:
        required(monkeypatch, address)
    assert "SSL_CERT_FILE" in refused.value.fix


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://store.example:9000"])
def test_http_is_refused_unless_it_is_allowed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="has no TLS") as refused:
        required(monkeypatch, address)
    assert "AWS_ALLOW_HTTP=true" in refused.value.fix
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    required(monkeypatch, address)


def test_a_store_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not answer"):
        required(monkeypatch, "https://127.0.0.1:9")


def test_a_proxy_is_gone_through(made: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(made[0]))
    monkeypatch.setenv("no_proxy", "")
    handler = type("Counting", (Proxy,), {"through": [], "names": []})
    with https_server(*made[1:]) as address, http_server(handler) as proxy:
        monkeypatch.setenv("https_proxy", proxy.replace("//", "//someone:p%40ss@"))
        required(monkeypatch, address)
    assert handler.through == [address.removeprefix("https://")]
    assert handler.names == ["Basic c29tZW9uZTpwQHNz"]


@pytest.mark.parametrize(
    ("url", "variables", "address"),
    [
        ("s3://b/x", {"AWS_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com"),
        ("s3://b/x", {"AWS_ENDPOINT_URL": "https://one", "AWS_ENDPOINT_URL_S3": "https://two"}, "https://two"),
        ("gs://b/x", {}, "https://storage.googleapis.com"),
        ("az://b/x", {"AZURE_STORAGE_ACCOUNT_NAME": "acc"}, "https://acc.blob.core.windows.net"),
    ],
)
def test_the_address_is_the_one_that_is_used(
    url: str, variables: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    job = parse_job({"data": {"train": url}, "model": {"name": "m"}}, "job")
    assert endpoint(find_places(job)[0]) == address


def test_an_account_of_azure_has_to_be_named() -> None:
    job = parse_job({"data": {"train": "az://b/x"}, "model": {"name": "m"}}, "job")
    with pytest.raises(InputError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        require_storage(job)
