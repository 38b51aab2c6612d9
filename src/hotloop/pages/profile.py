"""The page of a profile."""

from collections.abc import Mapping, Sequence

from hotloop.core.profile import KINDS, Profile
from hotloop.pages.environment import environment

_COLOURS = {
    "input": "#ea580c", "copy": "#ca8a04", "launch": "#9333ea", "sync": "#db2777", "compute": "#059669",
    "communication": "#2563eb", "other": "#94a3b8",
}  # fmt: skip


def render_profile(
    profile: Profile, times: Mapping[str, Sequence[tuple[float, float]]], span: tuple[float, float],
    memory: Sequence[tuple[float, int]] = (),
) -> str:  # fmt: skip
    """The page of a profile, as HTML without any outside reference.

    Args:
        times: by kind, what went on in the traced steps, in seconds.
        span: of these steps.
        memory: moments in them, and the bytes that were in tensors from then on.
    """
    begin, seconds = span[0], max(span[1] - span[0], 1e-9)
    bars = {
        kind: [(100 * (a - begin) / seconds, 100 * (b - a) / seconds) for a, b in times.get(kind, ())] for kind in KINDS
    }
    most = max((held for _, held in memory), default=0)
    curve = [(100 * (moment - begin) / seconds, 100 * held / most) for moment, held in memory] if most else []
    page = environment().get_template("profile.html")
    return page.render(profile=profile, kinds=KINDS, colours=_COLOURS, bars=bars, seconds=seconds if times else 0.0,
                       curve=curve, most=most)  # fmt: skip
