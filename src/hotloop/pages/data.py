"""What a check of images found, as a page with pictures."""

import io
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from PIL import Image

from hotloop import __version__
from hotloop.core.errors import DamagedSample
from hotloop.data.check import TINY_SIDE, Fault, Findings
from hotloop.data.decode import Box, decode_crop
from hotloop.data.image_list import ImageList
from hotloop.pages.environment import environment

_PICTURES, _SIDE = 24, 112
"""Pictures of each kind, and their side in pixels."""
_ROWS = 200


@dataclass(frozen=True)
class _Picture:
    source: str
    title: str
    text: str


def render_findings(findings: Findings, sets: Sequence[ImageList], max_pixels: int) -> str:
    """A page as HTML without any outside reference; up to 24 pictures of each kind.

    Args:
        sets: the data that were checked.
        max_pixels: as in the check, so that what is shown can be decoded.
    """
    groups = sorted(findings.duplicates, key=lambda group: -len(group.labels))[:_PICTURES]
    kinds = (findings.wrong_suffix, findings.rotated, findings.tiny, findings.huge)
    shown = {group.paths[0] for group in groups} | {fault.path for kind in kinds for fault in kind[:_PICTURES]}
    places = _places(sets, shown)

    def pictures(rows: Iterable[tuple[str, str, str]]) -> list[_Picture]:
        return [_Picture(_source(*places[path], max_pixels), title, text) for path, title, text in rows]

    def faulty(faults: Sequence[Fault]) -> list[_Picture]:
        return pictures((fault.path, fault.reason, fault.path) for fault in faults[:_PICTURES])

    return (
        environment()
        .get_template("data.html")
        .render(
            findings=findings,
            locations=list(findings.classes),
            duplicates=pictures(
                (group.paths[0], f"{len(group.paths)} files, {' and '.join(group.labels)}", ", ".join(group.paths[:4]))
                for group in groups
            ),
            wrong_suffix=faulty(findings.wrong_suffix),
            rotated=faulty(findings.rotated),
            tiny=faulty(findings.tiny),
            huge=faulty(findings.huge),
            most=_ROWS,
            tiny_side=TINY_SIDE,
            version=__version__,
        )
    )


def _places(sets: Sequence[ImageList], paths: set[str]) -> dict[str, tuple[ImageList, int]]:
    """Where in the data some images are."""
    return {
        path: (images, number)
        for images in sets
        for number in range(len(images) if paths else 0)
        if (path := images.path(number)) in paths
    }


def _source(images: ImageList, number: int, max_pixels: int) -> str:
    """The middle of an image as a data URL; empty if it has gone since."""

    def middle(height: int, width: int) -> Box:
        side = min(height, width)
        return Box((height - side) // 2, (width - side) // 2, side, side, flip=False)

    try:
        pixels = decode_crop(images.read(number), images.path(number), _SIDE, middle, max_pixels).resized(_SIDE)
    except DamagedSample:
        return ""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
