"""Several processes with one model: real ones, over gloo."""

from pathlib import Path

import pytest
from several import train_together


@pytest.mark.parametrize("window", [1, 2])
def test_two_ranks_train_as_one_with_the_whole_batch(tmp_path: Path, window: int) -> None:
    one = train_together(tmp_path / "one", 1, window)[0]
    two = train_together(tmp_path / "two", 2, window)
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-5)
    means = [sum(pair) / 2 for pair in zip(two[0]["losses"], two[1]["losses"], strict=True)]
    assert means == pytest.approx(one["losses"], abs=1e-5)
    assert two[0]["told"] == []


@pytest.mark.parametrize("window", [1, 2])
def test_ranks_agree_on_smaller_pieces_when_memory_runs_out_on_one(tmp_path: Path, window: int) -> None:
    one = train_together(tmp_path / "one", 1, window)[0]
    two = train_together(tmp_path / "two", 2, window, most=3)
    assert [rank["pieces"] for rank in two] == [4, 4]
    assert all(rank["sizes"][-1] == 2 for rank in two)
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-5)
    assert [len(rank["told"]) for rank in two] == [2, 2]
    assert "out of memory; each batch is now trained on in 4 pieces" in two[0]["told"][1]
