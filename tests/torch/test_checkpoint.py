import errno
import hashlib
import os
import re
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hotloop import ArrayDataset, Checkpointer
from hotloop.core.errors import CheckpointError, InputError
from hotloop.core.history import History
from hotloop.core.job_file import parse_job
from hotloop.core.units import Interval
from hotloop.train.checkpoint.checkpointer import Loaded, load_checkpoint, named_checkpoint
from hotloop.train.checkpoint.files import MANIFEST, manifest_text, read_manifest
from hotloop.train.checkpoint.hashes import HashedTogether
from hotloop.train.checkpoint.schedule import SaveSchedule, young_interval
from hotloop.train.checkpoint.table import stored_checkpoints
from hotloop.train.heartbeat import Heart
from hotloop.train.resume import check_identity, identity
from hotloop.train.resume_point import looked_up
from hotloop.train.world import World


def state(number: int) -> dict[str, object]:
    return {"number": number, "weights": torch.full((1000,), float(number))}


def filled(folder: Path, numbers: list[int], keep: int = 9) -> list[Path]:
    checkpointer = Checkpointer(folder, keep)
    return [checkpointer.save(state(number), step=number, epoch=number // 10) for number in numbers]


def damage(path: Path, kind: str) -> None:
    file = path / "state.pt"
    content = file.read_bytes()
    match kind:
        case "flipped bit":
            middle = len(content) // 2
            file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        case "cut":
            file.write_bytes(content[:-100])
        case "empty":
            file.write_bytes(b"")
        case "gone":
            file.unlink()
        case "manifest gone":
            (path / "manifest.json").unlink()
        case "manifest cut":
            (path / "manifest.json").write_text('{"format": 1, "fi')
        case "manifest odd":
            (path / "manifest.json").write_text("[]")
        case "manifest null":
            (path / "manifest.json").write_text("null")
        case "file a folder":
            (path / "state.pt").unlink()
            (path / "state.pt").mkdir()
        case "manifest no text":
            (path / "manifest.json").write_bytes(b"\x80" + (path / "manifest.json").read_bytes())
        case "manifest deep":
            (path / "manifest.json").write_text("[" * 100_000)
        case "files odd":
            change_manifest(path, files=["state.pt"])
        case "no file":
            change_manifest(path, files={})
        case "manifest changed":
            manifest = (path / "manifest.json").read_text()
            (path / "manifest.json").write_text(manifest.replace('"tensors": []', '"tensors": [0]'))


DAMAGES = ["flipped bit", "cut", "empty", "gone", "manifest gone", "manifest cut", "manifest odd"]
DAMAGES += [
    "manifest null",
    "file a folder",
    "manifest no text",
    "manifest deep",
    "files odd",
    "no file",
    "manifest changed",
]


def change_manifest(path: Path, **changes: object) -> None:
    manifest = read_manifest((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(manifest_text({**manifest, **changes}))


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    filled(tmp_path, [7])
    loaded = Checkpointer(str(tmp_path)).latest()
    assert loaded is not None
    assert loaded.state["number"] == 7
    assert torch.equal(loaded.state["weights"], torch.full((1000,), 7.0))


def test_the_newest_is_by_epoch_and_step_and_old_ones_go(tmp_path: Path) -> None:
    filled(tmp_path, [1, 2, 9, 10, 11], keep=2)
    assert sorted(os.listdir(tmp_path)) == ["epoch-0001-step-00000010", "epoch-0001-step-00000011"]
    assert Checkpointer(tmp_path / "none").latest() is None


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, kind: str) -> None:
    paths = filled(tmp_path, [1, 2, 3])
    damage(paths[2], kind)
    damage(paths[1], "flipped bit")
    warnings: list[str] = []
    loaded = Checkpointer(tmp_path, warn=warnings.append).latest()
    assert loaded is not None
    assert loaded.state["number"] == 1
    assert len(warnings) == 2
    assert str(paths[2]) in warnings[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("flipped bit", r"state\.pt is not what was written \(SHA-256 \w{8}\.\.\., \w{8}\.\.\. was written\)"),
        ("cut", r"state\.pt has [\d,]+ bytes, [\d,]+ were written"),
        ("empty", r"state\.pt has 0 bytes, [\d,]+ were written"),
        ("gone", r"state\.pt is missing"),
        ("manifest gone", r"manifest\.json is missing"),
        ("manifest null", r"manifest\.json is no object of JSON"),
        ("manifest cut", r"manifest\.json is no object of JSON"),
        ("manifest no text", r"manifest\.json is no object of JSON"),
        ("file a folder", r"state\.pt is a folder"),
    ],
)
def test_damage_is_told_in_words(tmp_path: Path, kind: str, said: str) -> None:
    path = filled(tmp_path, [1, 2])[1]
    damage(path, kind)
    warnings: list[str] = []
    Checkpointer(tmp_path, warn=warnings.append).latest()
    (told,) = warnings
    assert re.fullmatch(f"{re.escape(str(path))} is damaged: {said}; trying the one before", told), told


def test_damage_is_told_with_both_sizes_and_both_hashes(tmp_path: Path) -> None:
    path = filled(tmp_path, [1])[0]
    content = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"has {len(content) - 1:,} bytes, {len(content):,} were written"):
        load_checkpoint(path)
    (path / "state.pt").write_bytes(content[:-1] + b"x")
    here, then = (hashlib.sha256(one).hexdigest()[:8] for one in (content[:-1] + b"x", content))
    with pytest.raises(CheckpointError, match=rf"SHA-256 {here}\.\.\., {then}\.\.\. was written"):
        load_checkpoint(path)


def test_a_part_that_is_gone_is_named(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save({"large": torch.zeros(100_000)}, step=1)
    (path / "part-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError) as told:
        load_checkpoint(path)
    assert told.value.cause == "part-00001-of-00001.safetensors is missing"


@pytest.mark.parametrize(
    "odd", [5, {}, {"bytes": "9", "sha256": "x"}, {"bytes": 9, "sha256": "x", "more": 1}], ids=repr
)
def test_a_manifest_that_does_not_say_what_a_file_was_is_told(tmp_path: Path, odd: object) -> None:
    path = filled(tmp_path, [1])[0]
    change_manifest(path, files={"state.pt": odd})
    with pytest.raises(CheckpointError, match=r"manifest\.json does not say which size and SHA-256 state\.pt has"):
        load_checkpoint(path)


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    filled(tmp_path, [1])
    (tmp_path / ".epoch-0000-step-00000002.tmp").mkdir()
    (tmp_path / ".epoch-0000-step-00000002.tmp/state.pt").write_bytes(b"half")
    assert Checkpointer(tmp_path).latest() is not None
    assert os.listdir(tmp_path) == ["epoch-0000-step-00000001"]


def test_damaged_ones_do_not_push_the_last_good_one_out(tmp_path: Path) -> None:
    paths = filled(tmp_path, [1, 2, 3], keep=9)
    damage(paths[1], "cut")
    damage(paths[2], "cut")
    checkpointer = Checkpointer(tmp_path, keep=2)
    checkpointer.latest()
    checkpointer.save(state(4), step=4)
    damage(tmp_path / "epoch-0000-step-00000004", "cut")
    loaded = Checkpointer(tmp_path).latest()
    assert loaded is not None
    assert loaded.state["number"] == 1


@given(st.integers(0, 10**9), st.integers(0, 7))
def test_no_changed_bit_is_accepted(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("bits")
    file = filled(folder, [1])[0] / "state.pt"
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1 << bit
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="all 1 checkpoints"):
        Checkpointer(folder).latest()


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path, [1, 2])[1]
    change_manifest(path, format=3)
    before = listing(tmp_path)
    for read in (lambda: load_checkpoint(path), Checkpointer(tmp_path).latest, Checkpointer(tmp_path).latest):
        with pytest.raises(CheckpointError, match="is of format 3"):
            read()
    assert listing(tmp_path) == before
    (told,) = (one.damage for one in stored_checkpoints(path, verify=True))
    assert "format 3" in (told or "")


def test_when_all_are_damaged_no_start_trains_from_zero(tmp_path: Path) -> None:
    for path in filled(tmp_path, [1, 2]):
        damage(path, "cut")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="all 2 checkpoints") as caught:
            Checkpointer(tmp_path).latest()
        assert "damaged-epoch-0000-step-00000001" in caught.value.cause


def test_when_all_are_abandoned_no_start_trains_from_zero(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    filled(tmp_path / "other", [0])
    filled(tmp_path, [1, 2])
    Checkpointer(tmp_path).abandon_for(named_checkpoint(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="all 2 checkpoints"):
        Checkpointer(tmp_path).latest()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    filled(tmp_path, [1, 2])
    before = listing(tmp_path)

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", fails)
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            Checkpointer(tmp_path).latest()
    assert listing(tmp_path) == before
    loaded = Checkpointer(tmp_path).latest()
    assert loaded is not None
    assert loaded.state["number"] == 2


def test_the_order_is_that_of_numbers(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    for epoch in (9_998, 9_999, 10_000):
        path = checkpointer.save(state(epoch), step=2 * epoch, epoch=epoch)
        assert path.exists()
    assert listing(tmp_path) == ["epoch-10000-step-00020000", "epoch-9999-step-00019998"]
    loaded = checkpointer.latest()
    assert loaded is not None
    assert loaded.position == (10_000, 20_000)


def test_what_was_just_written_stays(tmp_path: Path) -> None:
    filled(tmp_path, [1, 2])
    assert Checkpointer(tmp_path, keep=1).save(state(0), step=0).exists()


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)


def test_stray_files_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("epoch-0000-notes", "epoch-0000-step-00000000", "epoch-9999-step-00000009.tar"):
        (tmp_path / name).write_text("a user's own")
    filled(tmp_path, [1, 2, 3], keep=1)
    loaded = Checkpointer(tmp_path).latest()
    assert loaded is not None
    assert loaded.state["number"] == 3
    assert len(listing(tmp_path)) == 4


def test_a_checkpoint_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    path = filled(tmp_path, [1])[0]
    path.rename(tmp_path / f".{path.name}.old")
    loaded = Checkpointer(tmp_path).latest()
    assert loaded is not None
    assert loaded.path == path
    assert listing(tmp_path) == [path.name]


@pytest.mark.parametrize("odd", [Path("a"), np.float64(1), np.zeros(3), frozenset({1})], ids=repr)
def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path, odd: object) -> None:
    path = filled(tmp_path, [1])[0]
    with pytest.raises(CheckpointError, match="could never be read again"):
        Checkpointer(tmp_path, keep=1).save({"odd": odd}, step=2)
    assert listing(tmp_path) == [path.name]


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    path = filled(tmp_path, [1])[0]
    torch.save({"evil": Evil()}, path / "state.pt")
    content = (path / "state.pt").read_bytes()
    described = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    change_manifest(path, files={"state.pt": described})
    with pytest.raises(CheckpointError, match=r"(?i)weights.only"):
        Checkpointer(tmp_path).latest()
    assert listing(tmp_path) == [path.name]


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    filled(tmp_path, [1])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            Checkpointer(tmp_path, keep=1).save(state(2), step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "epoch-0000-step-00000002" in caught.value.what
    assert os.listdir(tmp_path) == ["epoch-0000-step-00000001"]


def test_a_path_names_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    path = filled(tmp_path / "checkpoints", [3])[0]
    assert named_checkpoint(path).state["number"] == 3
    assert named_checkpoint(tmp_path).state["number"] == 3
    with pytest.raises(InputError, match="no checkpoint at"):
        named_checkpoint(tmp_path / "nowhere")


def test_naming_a_run_changes_nothing_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    paths = filled(folder, [1, 2, 3])
    damage(paths[2], "cut")
    (folder / ".epoch-0000-step-00000004.tmp").mkdir()
    before = listing(folder)
    warnings: list[str] = []
    assert named_checkpoint(tmp_path, warnings.append).state["number"] == 2
    assert str(paths[2]) in warnings[0]
    for path in paths[:2]:
        damage(path, "cut")
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
        named_checkpoint(tmp_path)
    assert listing(folder) == before


def test_going_back_to_a_copy_abandons_what_is_newer_whatever_the_copy_is_called(tmp_path: Path) -> None:
    paths = filled(tmp_path, [9, 10, 11])
    shutil.copytree(paths[1], tmp_path / "mybest")
    checkpointer = Checkpointer(tmp_path, keep=9)
    checkpointer.abandon_for(named_checkpoint(tmp_path / "mybest"))
    assert listing(tmp_path) == [f"abandoned-{paths[2].name}", paths[0].name, paths[1].name, "mybest"]


def test_what_is_set_aside_stays_when_a_run_goes_back_once_more(tmp_path: Path) -> None:
    """It comes to the same positions each time."""
    first, second = filled(tmp_path, [1, 2])
    whole = named_checkpoint(first)
    shutil.rmtree(second)
    for number in (7, 8, 9):
        Checkpointer(tmp_path).save({"number": number}, 2)
        Checkpointer(tmp_path).abandon_for(whole)
    aside = sorted(tmp_path.glob("abandoned-*"))
    assert [load_checkpoint(path).state["number"] for path in aside] == [7, 8, 9]
    assert named_checkpoint(tmp_path).path == first


def test_another_one_of_the_same_position_is_set_aside(tmp_path: Path) -> None:
    """A start that is killed before it has saved anything would else be followed by one that goes on from that."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    (own,) = filled(tmp_path / "own", [5])
    other = Checkpointer(tmp_path / "other").save({"number": 777}, 5)
    Checkpointer(own.parent).abandon_for(named_checkpoint(other))
    own.mkdir()  # of which nothing is left
    Checkpointer(own.parent).abandon_for(named_checkpoint(other))
    assert listing(own.parent) == [f"abandoned-{own.name}", f"abandoned-{own.name}-2"]


def test_a_checkpoint_that_no_job_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no identity, job, step, random_states, progress"):
        check_identity(load_checkpoint(filled(tmp_path, [1])[0]), {})


def test_what_is_decayed_decides_what_comes_next(tmp_path: Path) -> None:
    def identity_with(decay_vectors: bool) -> dict[str, str]:
        raw = {"data": {"train": "x"}, "model": {"name": "m"}, "optimizer": {"decay_vectors": decay_vectors}}
        return identity(parse_job(raw, "job"), nn.Linear(2, 2), ArrayDataset({"x": np.zeros(4)}))

    state = {"identity": identity_with(False), "job": {}, "step": {}, "random_states": {}, "progress": {}}
    loaded = Loaded(tmp_path, state, (0, 1))
    check_identity(loaded, identity_with(False))
    with pytest.raises(InputError, match=r"optimizer.decay_vectors = false"):
        check_identity(loaded, identity_with(True))


def test_no_bit_of_a_manifest_may_change(tmp_path: Path) -> None:
    path = filled(tmp_path, [1])[0]
    written = (path / MANIFEST).read_bytes()
    for bit in range(8 * len(written)):
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((TypeError, ValueError)):
            read_manifest(bytes(changed))


def test_youngs_interval() -> None:
    assert young_interval(2.0, 3600.0) == pytest.approx(120.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_saves_are_due_by_steps_epochs_and_seconds() -> None:
    by_steps = SaveSchedule(Interval(3, "steps"), 0)
    assert [by_steps.due(step, None) for step in range(1, 7)] == [False, False, True, False, False, True]
    by_epochs = SaveSchedule(Interval(2, "epochs"), 0)
    assert [by_epochs.due(9, None), by_epochs.due(9, 1), by_epochs.due(9, 2)] == [False, False, True]
    clock = Clock()
    by_seconds = SaveSchedule(Interval(30, "seconds"), 0, clock)
    clock.now = 29
    assert not by_seconds.due(1, None)
    clock.now = 30
    assert by_seconds.due(2, None)
    by_seconds.saved(1.0, 1.0)
    assert not by_seconds.due(3, None)


def test_automatic_saves_cost_at_most_a_hundredth_and_follow_young() -> None:
    clock = Clock()
    saves = SaveSchedule("auto", interruption_seconds=20_000, clock=clock)
    assert saves.due(1, finished_epochs=1), "nothing was saved yet"
    saves.saved(2.0, 2.0)
    clock.now = 199
    assert not saves.due(2, finished_epochs=2)
    clock.now = 201
    assert saves.due(3, finished_epochs=3)
    assert not saves.due(3, None)
    clock.now = young_interval(2.0, 20_300) + 1
    assert saves.due(4, None)


def test_what_a_run_has_met_so_far_says_how_often_it_is_saved() -> None:
    clock = Clock()
    known = SaveSchedule("auto", 3600, clock, History(seconds=36_000, interruptions=10))
    calm = SaveSchedule("auto", 3600, clock)
    for saves in (known, calm):
        saves.saved(2.0, 2.0)
    assert known.every_seconds == pytest.approx(young_interval(2.0, 3600))
    assert calm.every_seconds == pytest.approx(young_interval(2.0, 3600))
    clock.now = 36_000
    assert known.every_seconds == pytest.approx(young_interval(2.0, 75_600 / 11))
    assert calm.every_seconds == pytest.approx(young_interval(2.0, 39_600)), "ten hours without an interruption"


def test_a_save_in_the_background_costs_what_the_training_waits_for_it() -> None:
    clock = Clock()
    saves = SaveSchedule("auto", interruption_seconds=20_000, clock=clock)
    clock.now = 1000
    saves.saved(0.01, 60.0)  # begun at 940
    clock.now = 999
    assert not saves.due(2, finished_epochs=2), "the disk is not busy without a break"
    clock.now = 1001
    assert saves.due(3, finished_epochs=3)


def test_a_save_that_waits_for_the_one_before_is_told_once() -> None:
    for every, told in ((Interval(3, "steps"), True), ("auto", False)):
        saves = SaveSchedule(every, 0, Clock())
        saves.saved(0.1, 40.0)
        assert saves.wait_warning(0.5) == ""
        said = saves.wait_warning(13.0)
        assert ("waited 13.0 s until the checkpoint before was written, which took 40.0 s" in said) == told
        assert saves.wait_warning(13.0) == ""


@dataclass(frozen=True)
class BesideAnother(World):
    """The first of two ranks; the other one cannot read its files."""

    error: OSError = field(default_factory=FileNotFoundError)

    def from_first(self, value: Any) -> Any:
        return value

    def gathered(self, value: Any) -> list[Any]:
        return [value, self.error]


@pytest.mark.parametrize("error", [FileNotFoundError(), NotADirectoryError(), PermissionError(13, "no")])
def test_a_disk_that_another_machine_does_not_see_is_no_damage(tmp_path: Path, error: OSError) -> None:
    filled(tmp_path, [1, 2])
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match="cannot read") as told:
        Checkpointer(tmp_path).latest(hashes=HashedTogether(BesideAnother(size=2, error=error)))
    assert ("rank 1 does not see it" in told.value.cause) == (not isinstance(error, PermissionError))
    assert listing(tmp_path) == before
    damage(tmp_path / "epoch-0000-step-00000002", "gone")
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match=r"cannot read .*1"):
        Checkpointer(tmp_path, warn=warnings.append).latest(hashes=HashedTogether(BesideAnother(size=2, error=error)))
    assert len(warnings) == 1, "what the first rank lacks too is damage"


def test_a_named_checkpoint_is_read_by_all_ranks(tmp_path: Path) -> None:
    """One on the first machine's own disk is told before anything is trained."""
    path = filled(tmp_path, [1])[0]
    job = parse_job({"data": {"train": "x"}, "model": {"name": "m"}}, "job")
    world = BesideAnother(size=2, error=FileNotFoundError())
    with pytest.raises(CheckpointError, match="rank 1 does not see it: is its disk mounted"):
        looked_up(job, str(path), print, Heart(world))
