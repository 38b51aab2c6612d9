"""Curves of pages, and what they are read from: any bytes give a page."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.monitor.web.curves import Chart, Curve, marks, thinned
from hotloop.monitor.web.reading import charts, read_records

FIGURES = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e299, max_value=1e299)
PLAIN = st.none() | st.booleans() | st.floats() | st.integers() | st.just(10**400) | st.text()
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner))
RECORD = st.dictionaries(
    st.sampled_from(["event", "step", "epoch", "loss", "val_accuracy", "samples_per_second"]),
    JSON | st.sampled_from(["step", "epoch"]),
)


@pytest.mark.slow
@given(st.lists(st.binary() | RECORD.map(lambda record: json.dumps(record).encode())), st.integers(1, 500))
def test_any_file_can_be_read_and_drawn(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], most: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "metrics.jsonl"
    file.write_bytes(b"\n".join(lines))
    for bound in (most, 2**20):
        records = read_records(file, bound)
        assert records.left_out <= file.stat().st_size
        for chart in charts([("run", records)]):
            assert "nan" not in chart.to_svg()


def test_a_line_that_is_being_written_is_not_damaged(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert (len(read_records(file).records), read_records(file).damaged) == (1, 0)


def test_of_a_large_file_whole_lines_of_the_end_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"event": "step", "step": step}) + "\n" for step in range(1000)))
    records = read_records(file, 1000)
    steps = [record["step"] for record in records.records]
    assert steps == list(range(steps[0], 1000))
    assert records.damaged == 0
    assert file.stat().st_size - 1000 <= records.left_out < file.stat().st_size


@given(st.lists(st.tuples(st.integers(0, 10**9).map(float), FIGURES), min_size=1))
def test_curves_stay_inside_the_picture(points: list[tuple[float, float]]) -> None:
    svg = Chart("Loss", "step", [Curve("", sorted(points))]).to_svg()
    for line in re.findall(r'class="line s0" d="M([^"]*)"', svg):
        for x, y in (point.split() for point in line.split("L")):
            assert 0 <= float(x) <= 400
            assert 0 <= float(y) <= 200


@given(st.lists(FIGURES, min_size=1, max_size=3000))
def test_fewer_points_keep_the_spikes(values: list[float]) -> None:
    points = [(float(number), value) for number, value in enumerate(values)]
    fewer = thinned(points)
    assert len(fewer) <= 400
    assert {min(values), max(values)} <= {value for _, value in fewer}
    assert fewer == sorted(fewer)


def test_marks_are_round_and_hold_the_range() -> None:
    assert marks(0.13, 0.97, 4) == [0, 0.5, 1]
    assert marks(3, 1034, 4) == [0, 500, 1000, 1500]


def variables(css: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w[\w-]*): (#\w{6})", css))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out(scheme: str) -> None:
    css = resources.files("hotloop.monitor.web").joinpath("static/style.css").read_text()
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    colours = variables(light) | (variables(dark.split("\n* {")[0]) if scheme == "dark" else {})
    for back in ("back", "paper"):
        for text in ("ink", "soft", "link", "bad"):
            assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
    for state in ("good", "bad", "busy"):
        assert contrast(colours[state], colours[f"{state}-back"]) >= 4.5, state
    assert contrast(colours["ink"], colours["line"]) >= 4.5
    for line in range(8):
        assert contrast(colours[f"s{line}"], colours["paper"]) >= 3


def test_what_others_named_is_escaped() -> None:
    assert "<b>" not in Chart("Validation: <b>", "epoch", [Curve('"><b>', [(1, 1), (2, 2)])]).to_svg()


@pytest.mark.parametrize("high", [30_000.0, 150_000.0, 6e6, 0.0015, 3e-6])
def test_numbers_at_the_axis_fit_beside_it(high: float) -> None:
    drawn = str(Chart("x", "step", [Curve("", [(0, 0.0), (10, high)])]).to_svg())
    texts = re.findall(r'text-anchor="end">([^<]+)<', drawn)
    assert len(texts) > 2
    assert max(map(len, texts)) <= 7
