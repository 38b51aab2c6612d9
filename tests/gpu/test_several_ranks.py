"""Several ranks with one model."""

from pathlib import Path

import pytest
import torch
from several import train_together


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("window", "most"), [(1, 100), (2, 100), (1, 3)])
def test_two_cards_train_as_one(tmp_path: Path, window: int, most: int) -> None:
    one = train_together(tmp_path / "one", 1, window, device="cuda")[0]
    two = train_together(tmp_path / "two", 2, window, most, device="cuda")
    assert [rank["pieces"] for rank in two] == ([4, 4] if most == 3 else [1, 1])
    # Two layers' time is the host's; in pieces of one sample the first windows are tried anew.
    assert most == 3 or all(rank["captured"] for rank in two), two[0]["told"]
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-3)


@pytest.mark.parametrize("variant", ["apart", "held"])
def test_ranks_that_share_a_card_are_captured_too(tmp_path: Path, variant: str) -> None:
    """Over gloo, as NCCL wants a card for each rank."""
    size = 2 * torch.cuda.device_count()
    one = train_together(tmp_path / "one", 1, 1, device="cuda", variant=variant)[0]
    several = train_together(tmp_path / "several", size, 1, device="cuda", variant=variant)
    # Beside its module a weight is used as itself, whose gradient is added up on another stream.
    assert [rank["captured"] for rank in several] == [variant == "apart"] * size, several[0]["told"]
    assert all(rank["weights"] == several[0]["weights"] for rank in several)
    assert several[0]["weights"] == pytest.approx(one["weights"], abs=1e-3)
