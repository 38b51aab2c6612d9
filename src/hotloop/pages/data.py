"""What a check of images found, as a page with pictures."""

import io
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass

from PIL import Image

from hotloop import __version__
from hotloop.core.errors import DamagedSample
from hotloop.data.check import TINY_SIDE, Findings
from hotloop.data.decode import Box, decode_crop, read_file
from hotloop.pages.environment import environment

_PICTURES, _SIDE = 24, 112
"""Pictures of each kind, and their side in pixels."""
_ROWS = 200


@dataclass(frozen=True)
class _Picture:
    source: str
    title: str
    text: str


def render_findings(findings: Findings, max_pixels: int) -> str:
    """A page as HTML without any outside reference; up to 24 pictures of each kind.

    Args:
        max_pixels: as in the check, so that what is shown can be decoded.
    """

    def pictures(pairs: Iterable[tuple[str, str, str]]) -> list[_Picture]:
        return [_Picture(_source(path, max_pixels), title, text) for path, title, text in pairs]

    return (
        environment()
        .get_template("data.html")
        .render(
            findings=findings,
            locations=list(findings.classes),
            duplicates=pictures(
                (group.paths[0], f"{len(group.paths)} files, {' and '.join(group.labels)}", ", ".join(group.paths[:4]))
                for group in sorted(findings.duplicates, key=lambda group: -len(group.labels))[:_PICTURES]
            ),
            wrong_suffix=pictures((odd.path, odd.reason, odd.path) for odd in findings.wrong_suffix[:_PICTURES]),
            rotated=pictures((odd.path, odd.reason, odd.path) for odd in findings.rotated[:_PICTURES]),
            tiny=pictures((odd.path, odd.reason, odd.path) for odd in findings.tiny[:_PICTURES]),
            huge=pictures((odd.path, odd.reason, odd.path) for odd in findings.huge[:_PICTURES]),
            most=_ROWS,
            tiny_side=TINY_SIDE,
            version=__version__,
        )
    )


def _source(path: str, max_pixels: int) -> str:
    """The middle of an image as a data URL; empty if it has gone since."""

    def middle(height: int, width: int) -> Box:
        side = min(height, width)
        return Box((height - side) // 2, (width - side) // 2, side, side, flip=False)

    try:
        pixels = decode_crop(read_file(path), path, _SIDE, middle, max_pixels).resized(_SIDE)
    except DamagedSample:
        return ""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
