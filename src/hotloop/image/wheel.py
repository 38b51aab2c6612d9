"""The hotloop that runs here as a wheel, so that an image holds this one and no other."""

import base64
import hashlib
import zipfile
from importlib import metadata
from io import BytesIO
from pathlib import Path

import hotloop

_FIRST_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest that a ZIP file knows: the same bytes whenever it is made."""


def wheel_name() -> str:
    """hotloop-0.1.0-py3-none-any.whl."""
    return f"hotloop-{hotloop.__version__}-py3-none-any.whl"


def make_wheel() -> bytes:
    """A wheel of the package's files, and of the metadata with which it was installed."""
    package = Path(hotloop.__file__).parent
    files = {
        f"hotloop/{path.relative_to(package)}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    folder = f"hotloop-{hotloop.__version__}.dist-info"
    installed = metadata.distribution("hotloop")
    for name in ("METADATA", "entry_points.txt"):
        files[f"{folder}/{name}"] = (installed.read_text(name) or "").encode()
    files[f"{folder}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: hotloop\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{folder}/RECORD"] = "\n".join([*record, f"{folder}/RECORD,,", ""]).encode()
    written = BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _FIRST_DATE), content, zipfile.ZIP_DEFLATED)
    return written.getvalue()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
