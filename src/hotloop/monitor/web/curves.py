"""Curves as SVG that takes its colours from the page's style, light or dark, and reads well on a phone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 400, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 8, 22
"""On the left is room for seven characters in the larger type of a phone."""
_MOST_POINTS = 400
"""More than a chart has pixels for make pages slow."""
_SMALLEST = 1e-200


@dataclass(frozen=True)
class Curve:
    """One line: points in order of x."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Some curves over a common axis.

    Attributes:
        unit: of the axis x, "step" or "epoch".
        percent: the values are shares.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    percent: bool = False
    from_zero: bool = False

    @property
    def summary(self) -> str:
        """The curves in words, for who does not see them."""
        return f"{self.title} by {self.unit}. " + " ".join(self._told(curve) for curve in self.curves)

    def _told(self, curve: Curve) -> str:
        values = [value for _, value in curve.points]
        (first, begin), (last, end) = curve.points[0], curve.points[-1]
        show = self._shown
        return (
            f"{curve.label or self.title}: {show(begin)} at {self.unit} {first:,.0f}, {show(end)} at {last:,.0f}, "
            f"least {show(min(values))}, most {show(max(values))}."
        )

    def _shown(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.3g} %"
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"

    def to_svg(self) -> Markup:
        """The chart as an element; its styles are classes of the page's."""
        points = [point for curve in self.curves for point in curve.points]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        left, right = _widened(min(xs), max(xs))
        zero = self.percent or self.from_zero
        low, high = _widened(min(0.0, *ys) if zero else min(ys), max(ys))
        y_marks, x_marks = (
            marks(low, high, 4),
            [mark for mark in marks(left, right, 5) if left <= mark <= right and mark == int(mark)],
        )
        low, high = y_marks[0], y_marks[-1]

        def x_of(value: float) -> float:
            return _LEFT + (value - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

        def y_of(value: float) -> float:
            return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

        parts = []
        for mark in y_marks:
            y = y_of(mark)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{escape(self._shown(mark))}</text>')
        for mark in x_marks:
            x = x_of(mark)
            anchor = "end" if x > _WIDTH - 20 else "middle"
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{mark:,.0f}</text>')
        for number, curve in enumerate(self.curves):
            fewer = thinned(curve.points)
            line = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in fewer)
            parts.append(f'<path class="line s{number % 8}" d="M{line}"/>')
            if len(fewer) <= 30:
                dots = (f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2"/>' for x, y in fewer)
                parts.append(f'<g class="dots s{number % 8}">{"".join(dots)}</g>')
        head = f'<svg class="chart" role="img" aria-label="{escape(self.summary)}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        return Markup(head + "".join(parts) + "</svg>")  # noqa: S704  # what comes from outside is escaped above


def marks(low: float, high: float, about: int) -> list[float]:
    """Round numbers for an axis, from at most `low` to at least `high`; whole ones where these are far apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MOST_POINTS`, the lowest and highest of each piece among them: a spike stays."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-len(points) * 2 // _MOST_POINTS)
    fewer: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        piece = points[begin : begin + size]
        fewer += sorted({min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])})
    return fewer


def _widened(low: float, high: float) -> tuple[float, float]:
    if high - low > max(1e-12 * max(abs(low), abs(high)), _SMALLEST):
        return low, high
    room = abs(low) / 2 if abs(low) > _SMALLEST else 1.0
    return low - room, high + room
