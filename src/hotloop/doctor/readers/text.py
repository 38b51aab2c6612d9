"""Small files of /proc and /sys."""

from pathlib import Path


def text(path: str | Path) -> str:
    """Its content without the last line's end; "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip("\n\0")
    except OSError:
        return ""


def number(path: str | Path) -> int | None:
    """Its content as a number; None if it is none: "max"."""
    content = text(path).strip()
    return int(content) if content.lstrip("-").isdigit() else None


def number_list(content: str) -> list[int]:
    """The numbers of a list as the kernel writes it: "0-3,8" holds 0, 1, 2, 3 and 8."""
    found: list[int] = []
    for part in content.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found += range(int(first), int(last or first) + 1)
    return found


def readable(value: str) -> str:
    """Without what is no text: names of files and variables may be any bytes."""
    return value.encode(errors="surrogateescape").decode(errors="replace")
