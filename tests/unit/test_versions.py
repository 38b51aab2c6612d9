"""Which torch goes with a driver, a card and a Python."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from hotloop.core.errors import InputError
from hotloop.versions.solve import Impossible, Solution, Wish, obstacles, runs, solve, verdict
from hotloop.versions.table import Build, capability_of, shipped_table, specifier_of

TABLE = shipped_table()


def solved(wish: Wish) -> Solution:
    found = solve(wish, TABLE)
    assert isinstance(found, Solution), found
    return found


def test_a_current_card_gets_what_pip_takes() -> None:
    found = solved(Wish(driver="595.45.04", cards=((9, 0),), python="3.12", glibc="2.39"))
    assert (found.build.torch, found.build.default, found.verdict) == ("2.15.0", True, "full")
    assert found.install == "pip install torch==2.15.0 torchvision==0.29.2"


def test_an_old_card_gets_the_last_build_with_its_code() -> None:
    found = solved(Wish(driver="535.104", cards=(TABLE.capability("V100"),), python="3.11"))
    assert (found.build.torch, found.build.cuda, found.verdict) == ("2.14.1", "12.6", "limited")
    assert found.install == "uv pip install torch==2.14.1 torchvision==0.29.1 --torch-backend=cu126"
    assert any("error 222" in note for note in found.notes)


def test_an_old_driver_gets_an_older_cuda() -> None:
    assert solved(Wish(driver="550.90.07", cards=((9, 0),), torch=">=2.8")).build.cuda.startswith("12.")
    assert solved(Wish(driver="470.256.02", cards=((8, 0),))).build.cuda == "11.8"


def test_a_branch_alone_is_the_newest_of_it() -> None:
    assert solved(Wish(driver="580", cards=((9, 0),), cuda="13.0")).verdict == "full"
    assert solved(Wish(driver="580.50", cards=((9, 0),), cuda="13.0")).verdict == "limited"
    assert solved(Wish(driver="580.65", cards=((9, 0),), cuda="13.0")).verdict == "full"


def test_what_no_driver_runs_together_is_impossible() -> None:
    found = solve(Wish(driver="590.44.01", cards=((7, 0),)), TABLE)
    assert isinstance(found, Impossible)
    assert found.reasons == ("branch 580 is the last driver for Volta (compute capability 7.0); this one is 590.44.01",)
    changes = [change.text for change in found.changes]
    assert "with another driver (a driver from 525.60.13, of branch 580 at most): torch 2.14.1 for CUDA 12.6" in changes


def test_cards_that_share_no_driver_are_impossible_with_any() -> None:
    cards = (TABLE.capability("K80"), TABLE.capability("H100"))
    for driver in ("", "580.95.05"):
        found = solve(Wish(driver=driver, cards=cards), TABLE)
        assert isinstance(found, Impossible)
        assert "no driver knows all of these cards: one needs branch 520, another's last one is 470" in found.reasons[0]


def test_a_card_that_nobody_has_is_not_guessed() -> None:
    found = solve(Wish(cards=((13, 0),)), TABLE)
    assert isinstance(found, Impossible)
    assert found.reasons == ("the table has no card of compute capability 13.0",)


def test_without_a_driver_what_it_needs_is_told() -> None:
    found = solved(Wish(cards=((8, 0),), cuda="12.6"))
    assert found.verdict == ""
    assert found.notes == ("it needs a driver from 525.60.13, and from 560.28.03 for its PTX",)


def test_the_least_that_any_build_asks_for_is_the_reason() -> None:
    found = solve(Wish(driver="450.51.05", cards=((8, 0),)), TABLE)
    assert isinstance(found, Impossible)
    assert found.reasons == ("CUDA 11.7 needs a driver from 450.80.02; this one is 450.51.05",)


def test_a_newer_driver_is_asked_for_that_knows_the_card() -> None:
    found = solve(Wish(driver="565.57.01", cards=((12, 0),), cuda="12"), TABLE)
    assert isinstance(found, Impossible)
    assert found.changes[0].text.startswith("with another driver (a driver from 570)")


def test_arm_processors_have_builds_of_their_own() -> None:
    found = solved(Wish(driver="595.45.04", cards=((9, 0),), processor="aarch64"))
    assert found.install == "pip install torch==2.15.0 torchvision==0.29.2"
    assert found.build.cudnn


def test_the_nearest_change_is_named() -> None:
    found = solve(Wish(driver="580.95.05", cards=((12, 0),), python="3.8"), TABLE)
    assert isinstance(found, Impossible)
    assert [change.text.split(" (")[0].split(":")[0] for change in found.changes] == [
        "with another Python",
        "with another card",
    ]


@pytest.mark.parametrize(
    ("card", "binaries", "ptx", "how"),
    [
        ((8, 9), ["8.6"], [], "binary"),
        ((8, 7), ["8.6"], [], ""),
        ((8, 0), ["8.6"], [], ""),
        ((9, 0), ["8.6"], ["8.6"], "ptx"),
        ((10, 3), ["10.0"], [], "binary"),
        ((11, 0), ["10.0"], [], ""),
        ((10, 1), ["10.0"], [], ""),
        ((6, 2), ["6.2"], [], "binary"),
        ((7, 5), ["7.2"], [], ""),
    ],
)
def test_cards_run_code_of_a_lower_minor_capability(
    card: tuple[int, int], binaries: list[str], ptx: list[str], how: str
) -> None:
    build = TABLE.builds[0]
    own, later = (tuple(map(capability_of, texts)) for texts in (binaries, ptx))
    assert runs(Build(**{**vars(build), "binaries": own, "ptx": later}), card) == how


@given(
    driver=st.sampled_from(["", "450.80.02", "470", "525.60.13", "535.104", "570.26", "580", "595.45.04", "610.1"]),
    cards=st.lists(st.sampled_from(sorted(set(TABLE.cards.values()))), max_size=2),
    python=st.sampled_from(["", "3.8", "3.10", "3.12", "3.14", "3.15"]),
    cuda=st.sampled_from(["", "11", "12", "12.8", "13"]),
    torch=st.sampled_from(["", ">=2.8", "==2.4.*", "<2.1"]),
)
def test_what_is_found_fits_and_what_is_not_does_not(
    driver: str, cards: list[tuple[int, int]], python: str, cuda: str, torch: str
) -> None:
    wish = Wish(driver, tuple(cards), python, torch, cuda)
    found = solve(wish, TABLE)
    builds = [build for build in TABLE.builds if build.processor == "x86_64"]
    if isinstance(found, Impossible):
        assert found.reasons
        assert all(obstacles(build, wish, TABLE) for build in builds)
        return
    assert not obstacles(found.build, wish, TABLE)
    assert verdict(found.build, wish, TABLE) == found.verdict != "unsupported"
    fitting = [Version(build.torch) for build in builds if not obstacles(build, wish, TABLE)]
    assert Version(found.build.torch) == max(fitting)


def test_the_table_is_whole() -> None:
    assert all(build.cuda in TABLE.cudas and build.binaries and build.source for build in TABLE.builds)
    assert all(build.cudnn and build.nccl for build in TABLE.builds if build.default)
    assert len({build.torch for build in TABLE.builds if build.default}) == 28
    assert len(TABLE.cards) > 400
    known = {"RTX 4090": (8, 9), "h200": (9, 0), "Tesla T4": (7, 5), "a100": (8, 0), "K80": (3, 7), "B200": (10, 0)}
    known |= {"GeForce GTX 1080 Ti": (6, 1), "RTX 5090": (12, 0), "L40S": (8, 9)}
    for name, capability in known.items():
        assert TABLE.capability(name) == capability


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0)),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6)),
        ("4090", (8, 9)),
        ("rtx4090", (8, 9)),
        ("1080ti", (6, 1)),
        ("GTX_1080Ti", (6, 1)),
        ("NVIDIA TITAN X (Pascal)", (6, 1)),
        ("Tesla V100-SXM2-32GB-LS", (7, 0)),
        ("titan x", (6, 1)),
        ("gtx titan x", (5, 2)),
        ("V100", (7, 0)),
        ("NVIDIA L40S", (8, 9)),
    ],
)
def test_names_are_known_as_tools_print_them(name: str, capability: tuple[int, int]) -> None:
    assert TABLE.capability(name) == capability


def test_a_name_of_several_cards_is_asked_back() -> None:
    with pytest.raises(InputError, match="may be several cards"):
        TABLE.capability("TITAN")


def test_names_that_are_not_there_are_answered_with_near_ones() -> None:
    with pytest.raises(InputError, match="RTX 4090"):
        TABLE.capability("RTX 4091")
    with pytest.raises(InputError, match="no card that the table has"):
        TABLE.capability("SXM4")
    for name in ("MI300X", "Radeon RX 7900 XTX", "Intel Arc A770"):
        with pytest.raises(InputError, match="no card of NVIDIA"):
            TABLE.capability(name)
    with pytest.raises(InputError, match="no compute capability"):
        capability_of("hopper")
    with pytest.raises(InputError, match="no version"):
        specifier_of("newest")
