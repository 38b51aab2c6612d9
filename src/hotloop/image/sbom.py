"""What an image consists of, as CycloneDX."""

import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hotloop.core.errors import InputError
from hotloop.image.lock import Locked

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

_NAMESPACE = uuid.UUID("0f6d9b2e-6f0b-5d0c-9c2f-6a5f1e0d7c11")
"""So that the same packages get the same serial number."""


def sbom(name: str, version: str, packages: Sequence[Locked], timestamp: int) -> dict[str, Any]:
    """A bill of materials, CycloneDX 1.6; the same for the same packages and time.

    Args:
        name, version: of what consists of them.
        timestamp: seconds since 1970.

    Raises:
        InputError: the library for it is not there.
    """
    try:
        from cyclonedx.model.bom import Bom
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.output.json import JsonV1Dot6
    except ImportError as error:
        fix = 'pip install "hotloop[image]"'
        raise InputError("bills of materials need cyclonedx-python-lib", str(error), fix) from None

    whole = Component(name=name, version=version, type=ComponentType.CONTAINER, bom_ref=name)
    components = [_component(one) for one in packages]
    bom = Bom(components=components)
    bom.metadata.component = whole
    bom.metadata.timestamp = datetime.fromtimestamp(timestamp, UTC)
    bom.register_dependency(whole, components)
    bom.serial_number = uuid.uuid5(
        _NAMESPACE, " ".join([name, version, *(f"{one.name}=={one.version}" for one in packages)])
    )
    content: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    return content


def _component(package: Locked) -> "Component":
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    # A lock file has a hash for each wheel that would do; which of them is installed is not known then.
    only = package.hashes[0].partition(":")[2] if len(package.hashes) == 1 else ""
    address = PackageURL("pypi", None, package.name.lower().replace("_", "-"), package.version)
    return Component(
        name=package.name,
        version=package.version,
        type=ComponentType.LIBRARY,
        purl=address,
        bom_ref=address.to_string(),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=only)] if only else [],
    )
