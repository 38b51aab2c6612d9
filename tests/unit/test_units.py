import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.units import Interval, count, escaped, format_bytes, format_seconds


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("7 steps", 7, "steps"),
        ("1 step", 1, "steps"),
        ("1 epoch", 1, "epochs"),
        ("30 s", 30, "seconds"),
        ("30s", 30, "seconds"),
        ("1.5 min", 90, "seconds"),
        ("2 hours", 7200, "seconds"),
        ("4 H", 14400, "seconds"),
    ],
)
def test_intervals_are_read_as_people_write_them(text: str, amount: float, unit: str) -> None:
    assert Interval.parse(text) == Interval(amount, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "7", "steps", "7 foos", "-1 steps", "0 s", "1.5 steps", "7 steps more", "٧ steps x"]
)
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write an amount|more than 0|whole number"):
        Interval.parse(text)


@given(st.integers(1, 10**6), st.sampled_from(["steps", "epochs", "seconds"]))
def test_an_interval_survives_being_written(amount: int, unit: str) -> None:
    interval = Interval(amount, unit)  # type: ignore[arg-type]
    assert Interval.parse(str(interval)) == interval


def test_amounts_for_people() -> None:
    assert [format_bytes(size) for size in (0, 1536, 3 << 30, 5 << 40)] == ["0 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
    assert [format_seconds(s) for s in (4.2e-5, 0.0321, 3.21, 72, 3725)] == [
        "42 µs",
        "32.1 ms",
        "3.2 s",
        "1 min 12 s",
        "1 h 02 min",
    ]
    assert [count(1, "class", "classes"), count(1200, "file")] == ["1 class", "1,200 files"]


def test_names_stay_in_their_line() -> None:
    assert escaped("größe 1.jpg") == "größe 1.jpg"
    assert escaped("a\nb\x1b[2J\udcff") == "a\\nb\\x1b[2J\\udcff"
