"""`hotloop plan spot`: what it says, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from command import Command

SPOT = ("plan", "spot", "--lifetime", "6h", "--save", "2s")


def test_whether_spot_pays_and_how_far_apart_to_save(hotloop: Command) -> None:
    done = hotloop(*SPOT, "--price", "1.9", "--on-demand", "4.1", "--work", "40h", expect=0)
    assert "a machine lives 6 h 00 min (a mean, whose risk stays)" in done.out
    assert "is saved; spot pays up to" in done.out
    assert "40 h 00 min of work take about" in done.out
    found = json.loads(hotloop(*SPOT, "--price", "1.9", "--on-demand", "4.1", "--json", expect=0).out)
    assert found["interval_seconds"] == pytest.approx(found["daly_seconds"], rel=0.1)
    assert found["price"]["saving"] > 0.5


def test_where_it_does_not_pay_that_is_said(hotloop: Command) -> None:
    done = hotloop(*SPOT, "--price", "4.1", "--on-demand", "4.1", expect=0)
    assert "spot does not pay" in done.out


def test_several_machines_are_lost_sooner_and_less_so_in_one_zone(hotloop: Command) -> None:
    def first(*options: str) -> float:
        return float(json.loads(hotloop(*SPOT, *options, "--json", expect=0).out)["first_loss_seconds"])

    assert first("--machines", "4") < first("--machines", "4", "--together", "0.8") < first()


@pytest.mark.slow
def test_a_trace_is_played_through_and_the_page_shows_it(hotloop: Command, tmp_path: Path) -> None:
    lines = ["start,end", *(f"{10_000 * number},{10_000 * number + 4000 + 400 * number}" for number in range(16))]
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n")
    trace = ("--trace", str(tmp_path / "trace.csv"), "--save", "2s", "--work", "10h")
    done = hotloop("plan", "spot", *trace, "--page", str(tmp_path / "spot.html"), expect=0)
    assert "as observed, 16 losses" in done.out
    assert "is no work in nine of ten times as long as the trace" in done.out
    assert "played through the trace from 200 moments" in done.out
    played = json.loads(hotloop("plan", "spot", *trace, "--json", expect=0).out)["played"]
    walls = [played[name]["wall_seconds"] for name in ("low", "middle", "high")]
    assert walls == sorted(walls)
    page = (tmp_path / "spot.html").read_text()
    assert "Share of the paid time that is work" in page
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?https?:""", page), "nothing is loaded from elsewhere"


def test_machines_that_live_equally_long_are_planned_without_a_warning(hotloop: Command, tmp_path: Path) -> None:
    """As where each is taken away after a day; what it writes beside the answer would be numpy's."""
    lines = ["start,end", *(f"{90_000 * number},{90_000 * number + 86_400 + 30 * number}" for number in range(4))]
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n")
    done = hotloop("plan", "spot", "--trace", str(tmp_path / "trace.csv"), "--save", "2s", expect=0)
    assert "fitted to 4 losses" in done.out
    assert done.err == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--save", "2s"), "one of --lifetime and --trace is needed"),
        (("--lifetime", "6h"), "Missing option '--save'"),
        (("--lifetime", "6h", "--trace", "x", "--save", "2s"), "one of --lifetime and --trace is needed"),
        (("--lifetime", "soon", "--save", "2s"), "'soon' is no duration"),
        (("--lifetime", "0h", "--save", "2s"), "'0h' is no duration"),
        (("--lifetime", "6h", "--save", "2s", "--price", "1"), "--price and --on-demand go together"),
        (("--lifetime", "6h", "--save", "2s", "--price", "nan", "--on-demand", "2"), "'nan' is no amount of money"),
        (("--lifetime", "6h", "--save", "2s", "--noticed", "2"), "2.0 is not in the range"),
        (("--lifetime", "6h", "--save", "2s", "--noticed", "nan"), "'nan' is no number"),
        (("--lifetime", "6h", "--save", "2s", "--shape", "nan"), "'nan' is no number"),
        (("--lifetime", "6h", "--save", "2s", "--together", "nan"), "'nan' is no number"),
        (("--trace", "none.csv", "--save", "2s"), "none.csv cannot be read"),
        (("--lifetime", "6h", "--save", "2s", "--page", "/proc/none/page.html"), "cannot write"),
        (("--lifetime", "6h", "--save", "2s", "--page", "/dev/null/page.html"), "is a file; --page FILE"),
    ],
)
def test_bad_input(hotloop: Command, options: tuple[str, ...], said: str) -> None:
    assert said in hotloop("plan", "spot", *options, expect=2).err


@pytest.mark.parametrize("save", ["1h", "1m"])
def test_where_nothing_is_ever_done_that_is_said(hotloop: Command, save: str) -> None:
    options = ("--lifetime", "1s", "--save", save, "--work", "10h", "--price", "1", "--on-demand", "2")
    said = hotloop("plan", "spot", *options, expect=0).out
    assert "nothing is ever done" in said
    assert "10 h" not in said
    found = json.loads(hotloop("plan", "spot", *options, "--json", expect=0).out, parse_constant=pytest.fail)
    assert found["price"]["useful_hour"] is None
    assert (found["wall_seconds"], found["paid_seconds"], found["cost"]) == (None, None, None)


def test_what_is_not_known_is_not_told_as_nothing(hotloop: Command) -> None:
    without = json.loads(hotloop(*SPOT, "--json", expect=0).out)
    assert (without["wall_seconds"], without["paid_seconds"], without["cost"]) == (None, None, None)
    unpriced = json.loads(hotloop(*SPOT, "--work", "40h", "--json", expect=0).out)
    assert unpriced["paid_seconds"] >= 40 * 3600
    assert unpriced["cost"] is None
