from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.history import History, note_start, read_history


def test_starts_are_counted_with_how_the_one_before_ended(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"
    assert read_history(file) == History()
    note_start(file, 1000.0, None, was_interrupted=True)
    assert read_history(file) == History(), "there was nothing to interrupt"
    note_start(file, 2000.0, 1600.0, was_interrupted=True)
    note_start(file, 3000.0, 2900.0, was_interrupted=False)
    assert read_history(file) == History(1500.0, 1)


def test_a_damaged_line_tells_nothing(tmp_path: Path) -> None:
    file = tmp_path / "starts.jsonl"
    note_start(file, 1000.0, None, was_interrupted=False)
    file.write_text(file.read_text() + "{cut o\n")
    note_start(file, 2000.0, 1600.0, was_interrupted=True)
    note_start(file, 3000.0, 2100.0, was_interrupted=True)
    assert read_history(file) == History(100.0, 1)


def test_without_a_history_the_guess_stays() -> None:
    assert History().expected_seconds(14400) == 14400


@given(st.floats(1, 1e6), st.integers(1, 1000), st.floats(60, 1e5))
def test_many_interruptions_outweigh_the_guess(between: float, number: int, guess: float) -> None:
    expected = History(between * number, number).expected_seconds(guess)
    assert min(between, guess) <= expected * (1 + 1e-9)
    assert expected <= max(between, guess) * (1 + 1e-9)
    assert abs(expected - between) == pytest.approx(abs(guess - between) / (1 + number), rel=1e-6, abs=1e-3)
