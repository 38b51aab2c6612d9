"""What the markers of a JPEG say of it, without decoding."""

_START, _END = b"\xff\xd8", b"\xff\xd9"
_TAIL_BYTES = 64
"""In which a complete file has its end: some have a few bytes behind it."""
_BASELINE, _SCAN, _ADOBE = 0xC0, 0xDA, 0xEE
_OTHER_FRAMES = frozenset(range(0xC1, 0xD0)) - {0xC4, 0xC8, 0xCC}
_YCBCR = 1
_SAMPLINGS = frozenset({0x11, 0x21, 0x22})
"""Of brightness to colour: 4:4:4, 4:2:2, 4:2:0."""


def simple_size(content: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG of the common kind, None of any other.

    The common kind is what decoders in hardware take: baseline, eight bits, YCbCr in 4:4:4, 4:2:2 or 4:2:0, one scan;
    and complete, as they do not tell of an image whose end is missing.
    """
    if not content.startswith(_START) or _END not in content[-_TAIL_BYTES:]:
        return None
    size, position = None, len(_START)
    while position + 4 <= len(content) and content[position] == 0xFF:
        marker, length = content[position + 1], int.from_bytes(content[position + 2 : position + 4])
        segment = content[position + 4 : position + 2 + length]
        if marker == _SCAN:
            return size if segment[:1] == b"\x03" else None
        if marker in _OTHER_FRAMES or _is_rgb(marker, segment) or (marker == _BASELINE and size):
            return None
        if marker == _BASELINE and not (size := _size_of_frame(segment)):
            return None
        position += 2 + length
    return None


def _size_of_frame(frame: bytes) -> tuple[int, int] | None:
    """Of eight bits and three components, all but the first sampled once."""
    if len(frame) != 15 or frame[0] != 8 or frame[5] != 3:
        return None
    first, *others = frame[7::3]
    if first not in _SAMPLINGS or others != [0x11, 0x11] or frame[6::3] == b"RGB":
        return None
    height, width = int.from_bytes(frame[1:3]), int.from_bytes(frame[3:5])
    return (height, width) if height and width else None


def _is_rgb(marker: int, segment: bytes) -> bool:
    return marker == _ADOBE and segment.startswith(b"Adobe") and len(segment) >= 12 and segment[11] != _YCBCR
