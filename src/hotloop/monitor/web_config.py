"""Who may read, and how it is encrypted: the file that Prometheus's own exporters take (web configuration).

Read again when it changes, or a certificate does: certificates are renewed while the exporter runs.
"""

import ssl
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from hotloop.core.errors import InputError
from hotloop.core.files import state_of
from hotloop.monitor.passwords import Passwords

Hash = Annotated[str, StringConstraints(pattern=r"^\$2[aby]\$\d\d\$[./A-Za-z0-9]{53}$")]
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_FIX = "see docs/exporter.md; hotloop exporter --help"
_HASH = (
    "python -c 'import bcrypt, getpass as g; print(bcrypt.hashpw(g.getpass().encode(), bcrypt.gensalt(10)).decode())'"
)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tls(_Part):
    """Certificates; paths are seen from the file's folder."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    min_version: Literal["TLS12", "TLS13"] = "TLS13"

    @model_validator(mode="after")
    def _has_authority(self) -> "Tls":
        if (self.client_auth_type == "NoClientCert") != (self.client_ca_file is None):
            raise ValueError("client_ca_file and client_auth_type go together")
        return self


class WebConfig(_Part):
    """The whole file."""

    tls_server_config: Tls | None = None
    basic_auth_users: dict[str, Hash] = Field(default_factory=dict)


class Web:
    """The file as it is now. For any thread.

    Args:
        note: told in one line that the file keeps nobody out, and why a changed one was not taken.

    Raises:
        InputError: it cannot be used as it is at the start.
    """

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path, self._note = path, note
        self._lock = Lock()
        self._files = [path]
        self._state = self._look()
        self._load()

    @property
    def encrypted(self) -> bool:
        """By TLS."""
        return self._context is not None

    @property
    def guarded(self) -> bool:
        """By passwords, or certificates of clients."""
        return self._passwords is not None or bool(self._context and self._context.verify_mode == ssl.CERT_REQUIRED)

    def current(self) -> tuple[ssl.SSLContext | None, Passwords | None]:
        """What holds for a new connection. If a changed file cannot be used, the former stays."""
        with self._lock:
            state = self._look()
            if state != self._state:
                self._state = state
                try:
                    self._load()
                except InputError as error:
                    self._note(f"{error.what}: {error.cause}; the former stays")
            return self._context, self._passwords

    def _look(self) -> list[str]:
        return [_state(path) for path in self._files]

    def _load(self) -> None:
        config = read_web_config(self._path)
        tls = config.tls_server_config
        context = _context(self._path, tls) if tls else None
        passwords = Passwords(config.basic_auth_users, _check()) if config.basic_auth_users else None
        self._context, self._passwords = context, passwords
        if not (self.encrypted or self.guarded):  # as an empty file, which Prometheus's exporters take
            self._note(f"--web-config {self._path} asks for neither TLS nor a password: whoever connects can read")
        named = (tls.cert_file, tls.key_file, tls.client_ca_file) if tls else ()
        self._files = [self._path, *(self._path.parent / one for one in named if one)]
        self._state = self._look()


def read_web_config(path: Path) -> WebConfig:
    """Read and check the file.

    Raises:
        InputError: it cannot be read, or holds what is not known.
    """
    try:
        content: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read --web-config {path}", cause, _FIX) from None
    except yaml.YAMLError as error:
        raise InputError(f"--web-config {path} is no YAML", " ".join(str(error).split()), _FIX) from None
    try:
        return WebConfig.model_validate({} if content is None else content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        fix = _FIX
        if where.startswith("basic_auth_users."):
            fix = _HASH
        elif where.endswith("min_version"):
            fix = "min_version: TLS13"
        # Without the value: it may be a password.
        raise InputError(f"--web-config {path} cannot be used", f"{where or 'file'}: {first['msg']}", fix) from None


def _context(path: Path, tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    folder = path.parent
    try:
        context.load_cert_chain(folder / tls.cert_file, folder / tls.key_file, password="")
        if tls.client_ca_file:
            context.load_verify_locations(folder / tls.client_ca_file)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(one) for one in (tls.cert_file, tls.key_file, tls.client_ca_file) if one)
        cause = error.strerror or str(error)
        raise InputError(
            f"--web-config {path}: {files} cannot be used", cause, "name a certificate and its key, both as PEM"
        ) from None
    context.verify_mode = _CLIENTS[tls.client_auth_type]
    return context


def _check() -> Callable[[bytes, bytes], bool]:
    try:
        import bcrypt
    except ImportError:
        raise InputError(
            "passwords need bcrypt", "it is not installed", 'pip install "hotloop[monitor]"'
        ) from None  # fmt: skip
    return bcrypt.checkpw


def _state(path: Path) -> str:
    try:
        return state_of(str(path))
    except OSError:
        return ""
