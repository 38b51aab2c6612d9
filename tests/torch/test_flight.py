"""Dumps of the flight recorder, as torch writes them."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotloop.core.errors import InputError
from hotloop.explain.flight import compared, is_dump, read_dump

LAST = """
import os
import sys
import torch
from torch import distributed
from hotloop.train.collectives import last_collective

distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
for group in (
    distributed.group.WORLD,
    distributed.new_group([0], group_desc="mine"),
    distributed.new_group([0]),
    distributed.new_group([0], use_local_synchronization=True),
):
    distributed.all_reduce(torch.ones(3), group=group)
    while last_collective().endswith("not done"):  # gloo's thread notes it, some moments after it is waited for
        pass
    print(last_collective())
sys.stdout.flush()
os._exit(0)  # gloo's threads abort some of the processes that end with groups
"""
SCRIPT = Path(__file__).parents[1] / "support/flight_ranks.py"


def dumped(kind: str, folder: Path) -> list[Path]:
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    subprocess.run([sys.executable, str(SCRIPT), kind, str(folder)], env=environment, timeout=120, check=True)
    return sorted(folder.glob("trace_rank_*"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="this torch records no gloo")
@pytest.mark.parametrize(
    ("kind", "cause", "said"),
    [
        (
            "late",
            "nccl-timeout",
            "rank 2 did not come: its last one was 3, all_reduce Float [1024] at flight_ranks",
        ),
        ("other", "collective-mismatch", "rank 1: broadcast Float [1024] at flight_ranks.py:"),
    ],
)
def test_the_rank_that_differs_is_named_with_its_line(tmp_path: Path, kind: str, cause: str, said: str) -> None:
    files = dumped(kind, tmp_path)
    assert all(map(is_dump, files))
    told = compared([read_dump(file) for file in files])
    assert [one.id for one in told] == [cause]
    assert any(note.startswith(said) for note in told[0].notes), told[0].notes
    alone = compared([read_dump(file) for file in files[:1]])
    assert alone[0].id == "rank-died"
    assert alone[0].notes[1] == "ranks 1, 2 left no dump"


@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch records no gloo")
def test_the_last_collective_is_told_with_its_group(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    command = [sys.executable, "-c", LAST, str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True, text=True)
    told = "gloo:all_reduce of Float [3], number 1 in {}, done".format
    *named, hashed = done.stdout.splitlines()
    assert named == [told("default_pg"), told("mine"), told("group 2")]
    assert re.sub(r"group \w{8},", "group HASH,", hashed) == told("group HASH")


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil",)


def test_a_pickle_with_code_in_it_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "trace_rank_0"
    file.write_bytes(pickle.dumps({"entries": [_Evil()]}))
    with pytest.raises(InputError, match="which no dump does"):
        read_dump(file)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("content", [b"\x80", b"\x80\x04]\x94.", b"\x80\x04}\x94.", b"\x80\x05" + bytes(range(200))])
def test_what_is_no_dump_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace_rank_0").write_bytes(content)
    with pytest.raises(InputError, match="no dump of the flight recorder"):
        read_dump(tmp_path / "trace_rank_0")
