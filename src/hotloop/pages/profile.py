"""The page of a profile."""

from collections.abc import Mapping, Sequence

from hotloop.core.profile import KINDS, Profile
from hotloop.pages.environment import environment

_COLOURS = {
    "input": "#ea580c", "copy": "#ca8a04", "launch": "#9333ea", "sync": "#db2777", "compute": "#059669",
    "communication": "#2563eb", "other": "#94a3b8",
}  # fmt: skip


def render_profile(
    profile: Profile, times: Mapping[str, Sequence[tuple[float, float]]], span: tuple[float, float]
) -> str:
    """The page of a profile, as HTML without any outside reference.

    Args:
        times: by kind, what went on in the traced steps, in seconds.
        span: of these steps.
    """
    begin, seconds = span[0], max(span[1] - span[0], 1e-9)
    bars = {
        kind: [(100 * (a - begin) / seconds, 100 * (b - a) / seconds) for a, b in times.get(kind, ())] for kind in KINDS
    }
    page = environment().get_template("profile.html")
    return page.render(profile=profile, kinds=KINDS, colours=_COLOURS, bars=bars, seconds=seconds if times else 0.0)
