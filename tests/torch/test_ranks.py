"""Several processes with one model: real ones, over gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as distributed
from several import spread_over_two, train_together

from hotloop.core.errors import HotloopError
from hotloop.train.world import peer_lost


@pytest.mark.parametrize(
    ("window", "variant"),
    [(1, "plain"), (2, "plain"), (1, "static"), (2, "static"), (1, "unused"), (1, "idle"), (2, "idle"), (1, "apart"),
     (2, "apart"), (1, "held")],
)  # fmt: skip
def test_two_ranks_train_as_one_with_the_whole_batch(tmp_path: Path, window: int, variant: str) -> None:
    one = train_together(tmp_path / "one", 1, window, variant="plain" if variant == "apart" else variant)[0]
    two = train_together(tmp_path / "two", 2, window, variant=variant)
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-4)
    means = [sum(pair) / 2 for pair in zip(two[0]["losses"], two[1]["losses"], strict=True)]
    assert means == pytest.approx(one["losses"], abs=1e-4)
    assert two[0]["told"] == []
    if variant in ("unused", "idle"):
        assert two[0]["weights"][:3] == [1.0] * 3


@pytest.mark.parametrize(
    ("window", "variant", "most", "pieces", "largest"),
    [
        (1, "plain", 3, 4, 2),
        (2, "plain", 3, 4, 2),
        (1, "wrapped", 3, 4, 2),
        (1, "backward", 4, 2, 4),
        (2, "uneven", 4, 2, 4),
        (1, "norm", 4, 2, 4),
        (2, "norm", 4, 2, 4),
    ],
)
def test_ranks_agree_on_smaller_pieces_when_memory_runs_out_on_one(
    tmp_path: Path, window: int, variant: str, most: int, pieces: int, largest: int
) -> None:
    two = train_together(tmp_path / "two", 2, window, most, variant=variant)
    assert [rank["error"] for rank in two] == ["", ""]
    assert [rank["pieces"] for rank in two] == [pieces] * 2
    assert all(max(rank["sizes"][-window * pieces :]) == largest for rank in two)
    assert two[0]["weights"] == two[1]["weights"]
    assert f"out of memory; each batch is now trained on in {pieces} pieces" in two[0]["told"][-1]
    if variant != "norm":  # which sees the pieces
        one = train_together(tmp_path / "one", 1, window, variant=variant)[0]
        assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-4)


def test_one_rank_alone_recovers_from_a_broken_backward_pass(tmp_path: Path) -> None:
    whole = train_together(tmp_path / "whole", 1, 1, variant="backward")[0]
    limited = train_together(tmp_path / "limited", 1, 1, most=4, variant="backward")[0]
    assert limited["pieces"] == 4
    assert limited["weights"] == pytest.approx(whole["weights"], abs=1e-4)


def test_a_sample_that_does_not_fit_stops_all_ranks(tmp_path: Path) -> None:
    two = train_together(tmp_path / "two", 2, 1, most=0)
    assert "a single sample does not fit" in two[1]["error"]
    assert "another rank has no room for a single sample" in two[0]["error"]


def test_ranks_that_cannot_agree_stop_with_an_error(tmp_path: Path) -> None:
    two = train_together(tmp_path / "two", 2, 1, most=0, variant="static")
    assert "a step that other ranks have begun does not fit" in two[1]["error"]


@pytest.mark.parametrize("window", [1, 2])
def test_both_ways_of_averaging_train_the_same(tmp_path: Path, window: int) -> None:
    one = train_together(tmp_path / "one", 1, window)[0]
    two = train_together(tmp_path / "two", 2, window, variant="trial")
    assert two[0]["apart"] == two[1]["apart"]
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-4)
    assert [rank["error"] for rank in two] == ["", ""]


@pytest.mark.parametrize(
    ("variant", "reasons"),
    [
        ("watched", ["weights have hooks", "another rank says why"]),
        ("reentrant", ["cannot be averaged after backward"] * 2),
        ("broken", ["another rank cannot", "this rank cannot"]),
    ],
)
def test_ranks_stay_with_averaging_during_backward_where_one_must(
    tmp_path: Path, variant: str, reasons: list[str]
) -> None:
    one = train_together(tmp_path / "one", 1, 1, variant=variant)[0]
    two = train_together(tmp_path / "two", 2, 1, variant=variant)
    assert [rank["apart"] for rank in two] == [False, False]
    assert all(reason in rank["not_captured"] for reason, rank in zip(reasons, two, strict=True))
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-4)


def test_the_order_of_the_optimizers_weights_does_not_matter(tmp_path: Path) -> None:
    one, two = (train_together(tmp_path / name, 2, 1, variant=name) for name in ("plain", "order"))
    assert two[0]["losses"] == pytest.approx(one[0]["losses"], abs=1e-4)
    assert two[0]["weights"] == two[1]["weights"]


def test_an_error_that_the_others_do_not_wait_for_ends_the_run(tmp_path: Path) -> None:
    two = train_together(tmp_path / "two", 2, 1, variant="late")
    assert two[1]["error"] == "RuntimeError: this rank cannot"
    assert two[0]["error"]


def test_a_rank_may_open_more_files_than_are_usual() -> None:
    code = """
import resource
from hotloop.train.world import _allow_open_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
_allow_open_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 131_072), hard)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_weights_that_get_no_gradient_any_more_are_named_where_gradients_are_averaged_after_backward(
    tmp_path: Path,
) -> None:
    """Momentum and decay would move them all the same."""
    for rank in train_together(tmp_path / "two", 2, 1, variant="fading"):
        assert len(rank["losses"]) == 6
        assert "weights got no gradient in this step: 1.extra.weight, 1.extra.bias\n" in rank["error"]


@pytest.mark.parametrize(
    ("variant", "syncs"), [("ddp", range(1)), ("ddp buffers", range(6, 9)), ("ddp frozen", range(3, 5))]
)
def test_running_statistics_are_sent_where_they_are_used_alone(tmp_path: Path, variant: str, syncs: range) -> None:
    found = spread_over_two(tmp_path / "found", variant)
    assert found[0]["syncs"] in syncs
    assert found[0]["state"] == found[1]["state"], "all evaluate with the first one's"
    if "buffers" not in variant:
        expected = spread_over_two(tmp_path / "expected", variant.replace("ddp", "plain"))
        assert expected[0]["syncs"] >= 6, "in each step"
        assert (found[0]["losses"], [*found[0]["state"].values()]) == (
            expected[0]["losses"], [*expected[0]["state"].values()],
        )  # fmt: skip


def test_gradients_lie_where_they_are_sent_from(tmp_path: Path) -> None:
    """Not in memory of their own too, from which each is copied."""
    assert [rank["places"][-1] for rank in spread_over_two(tmp_path / "found", "ddp")] == [1, 1]


def test_divided_weights_travel_as_bf16_to_layers_that_multiply_in_float8(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao, an extra")
    one, two = spread_over_two(tmp_path / "one", "float8 one"), spread_over_two(tmp_path / "two", "float8")
    assert (one[0]["types"], two[0]["types"]) == (["torch.float32"], ["torch.bfloat16"])
    assert two[0]["losses"] == pytest.approx(one[0]["losses"], rel=0.05)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer\nmore"), True),
        (distributed.DistBackendError("ncclUnhandledCudaError: of this rank"), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (BrokenPipeError(32, "Broken pipe"), False),
        (HotloopError("no copy", "Connection refused", "wait"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_errors_of_services_that_a_script_asks_are_no_lost_rank(error: Exception, said: bool) -> None:
    assert peer_lost(error) == (str(error).splitlines()[0] if said else "")
