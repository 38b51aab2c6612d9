"""The page of what comes of machines that may be taken away."""

from collections.abc import Mapping, Sequence

from hotloop.pages.charts import Chart, Series
from hotloop.pages.environment import environment

_PARTS = {
    "paid_share": ("work that counts", "#059669"), "lost_share": ("done again", "#ea580c"),
    "save_share": ("saves", "#2563eb"), "restart_share": ("restarts", "#9333ea"),
}  # fmt: skip


def render_spot(lines: Sequence[str], curve: Sequence[tuple[float, float]], outlook: Mapping[str, float]) -> str:
    """The page, as HTML without any outside reference.

    Args:
        lines: what is found, in words.
        curve: seconds between saves, and the share of the paid time that is work.
        outlook: shares of the paid time, by their names in `Outlook`, and the interval.
    """
    minutes = [seconds / 60 for seconds, _ in curve]
    chart = Chart(
        "share of the paid time that is work, by the minutes between saves", "minutes between saves",
        [Series("all intervals", minutes, [share for _, share in curve]),
         Series("this one", [outlook["interval"] / 60], [outlook["paid_share"]])],
        percent=True, log_x=True,
    )  # fmt: skip
    parts = [(words, colour, outlook[name]) for name, (words, colour) in _PARTS.items()]
    return environment().get_template("spot.html").render(lines=lines, parts=parts, chart=chart)
