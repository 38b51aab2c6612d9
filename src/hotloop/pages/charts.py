"""Charts as SVG text for a page."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

_INK = "#334155"
_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea")
_STYLE = {
    "svg.fonttype": "none",  # text stays text: smaller, selectable, readable by screen readers
    "svg.hashsalt": "hotloop",  # the same data gives the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#cbd5e1",
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Series:
    """One line of a chart, or points that nothing joins."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    joined: bool = True


@dataclass(frozen=True)
class Chart:
    """Some lines over a common axis.

    Attributes:
        percent: the values are shares, shown in percent from 0 on.
        marks: points are marked; for few of them.
    """

    title: str
    x_label: str
    series: Sequence[Series]
    percent: bool = False
    from_zero: bool = False
    marks: bool = False
    log: bool = False
    log_x: bool = False

    def to_svg(self) -> Markup:
        """The chart as an SVG element."""
        with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
            # Margins for the longest labels: a layout that measures them draws all twice, 0.15 s in place of 0.08.
            figure = Figure(figsize=(5.2, 2.6))
            axes = figure.subplots(gridspec_kw={"left": 0.145, "right": 0.95, "bottom": 0.18, "top": 0.93})
            for number, series in enumerate(self.series):
                colour = _COLOURS[number % len(_COLOURS)]
                marker = "o" if self.marks or len(series.x) == 1 or not series.joined else ""
                width = 1.4 if series.joined else 0.0
                axes.plot(series.x, series.y, label=series.label, color=colour, marker=marker, markersize=3, lw=width)
            axes.set_xlabel(self.x_label)
            if self.log:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
                axes.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
                axes.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
            if self.percent:
                axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=None))
            if self.percent or self.from_zero:
                axes.set_ylim(bottom=0)
            if self.log_x:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            else:
                axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True, nbins=6))
            if len(self.series) > 1:
                axes.legend()
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
        element = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label={quoteattr(self.title)}', 1)
        return Markup(element)  # noqa: S704  # matplotlib escapes what it draws
