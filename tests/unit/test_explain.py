"""The first cause of failures, from logs."""

import io
import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import RECORDINGS, changed

from hotloop.doctor.examine import examine
from hotloop.explain import scan as scanning
from hotloop.explain.causes import anchors, causes, patterns
from hotloop.explain.decide import decide
from hotloop.explain.lines import line_of, message_lines
from hotloop.explain.report import explained
from hotloop.explain.scan import NotText, scan

LOGS = Path(__file__).parents[1] / "logs"
FOLDERS = sorted(folder.name for folder in LOGS.iterdir() if folder.is_dir())
IDS = {known for id_ in causes() for known in causes()[id_].findings}


def listed(folder: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = tomllib.loads((LOGS / folder / "corpus.toml").read_text())["log"]
    return found


def first(raw: bytes) -> str:
    found = decide(scan(io.BytesIO(raw)))
    return found[0].id if found else "healthy"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_first_cause_of_each_log_is_named(folder: str) -> None:
    wrong = [
        (log["file"], log["cause"], got)
        for log in listed(folder)
        if (got := first((LOGS / folder / log["file"]).read_bytes())) != log["cause"]
    ]
    assert wrong == []


def test_the_corpus_is_what_was_promised() -> None:
    logs = [log for folder in FOLDERS for log in listed(folder)]
    assert len(logs) >= 150
    assert {log["cause"] for log in logs} >= set(causes()) - {"unknown"}
    assert sum(log["cause"] == "healthy" for log in logs) >= 15
    assert sum(bool(log["features"]) for log in logs) > len(logs) / 3
    for folder in FOLDERS:
        assert {log["file"] for log in listed(folder)} == {path.name for path in (LOGS / folder).glob("*.log")}


@pytest.mark.parametrize("block", [5_000, 40_000])
def test_a_log_that_is_read_in_small_pieces_says_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "_BLOCK", block)
    for log in listed("composed"):
        assert first((LOGS / "composed" / log["file"]).read_bytes()) == log["cause"], log["file"]


def test_the_first_rank_to_fail_is_found_among_a_million_lines(tmp_path: Path) -> None:
    oom = b"[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    late = b"[rank0]: [E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL\n"
    raw = b"".join(b"step %d loss 0.5 throughput 812.4\n" % number for number in range(1_000_000)) + oom + late * 500
    found = decide(scan(io.BytesIO(raw)))
    assert [one.id for one in found] == ["cuda-out-of-memory", "nccl-timeout"]
    assert found[0].evidence[0].number == 1_000_001
    assert found[0].evidence[0].prefix == "[rank3]: "


def test_other_encodings_are_read_and_bytes_are_refused() -> None:
    text = "epoch 1\r\nRuntimeError: CUDA error: no kernel image is available for execution on the device\r\n"
    assert first(text.encode("utf-16")) == "cuda-no-kernel-image"
    assert first(text.encode("latin-1") + b"\xff\xfe caf\xe9\n") == "cuda-no-kernel-image"
    with pytest.raises(NotText):
        first(b"\x7fELF\0\0\0\0" * 1000)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], deadline=None)
@given(st.data())
def test_what_a_pattern_matches_holds_one_of_its_anchors(data: st.DataObject) -> None:
    pattern = data.draw(st.sampled_from(patterns()))
    text = data.draw(st.from_regex(pattern.expression, alphabet=st.characters(codec="ascii")))
    assert any(anchor.decode() in text for anchor in pattern.anchors), text


def test_patterns_without_words_are_refused() -> None:
    with pytest.raises(ValueError, match="no literal part"):
        anchors(r"\w+ \d+|error")
    assert anchors(r"(?:killed|ended) by signal \d+") == (" by signal ",)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("[rank3]: RuntimeError: x", "RuntimeError: x"),
        ("[default0]:[rank0]: RuntimeError: x", "RuntimeError: x"),
        ("12: RuntimeError: x", "RuntimeError: x"),
        ("(RayTrainWorker pid=13332) RuntimeError: x", "RuntimeError: x"),
        ("\x1b[36m(RayTrainWorker pid=13332)\x1b[0m RuntimeError: x", "RuntimeError: x"),
        ("2025-09-16T09:58:33.027819447Z [rank10]: RuntimeError: x", "RuntimeError: x"),
        ("trainer-1  | RuntimeError: x", "RuntimeError: x"),
        ("Aug 11 05:00:05 node-1 nightly[70188]: RuntimeError: x", "RuntimeError: x"),
        ("[1,3]<stderr>:RuntimeError: x", "RuntimeError: x"),
        ("RuntimeError: [rank3]: x", "RuntimeError: [rank3]: x"),
    ],
)
def test_what_launchers_put_before_a_line_is_taken_off(raw: str, text: str) -> None:
    assert line_of(1, raw.encode()).text == text


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 80.00 GiB"
)
OOM += (
    " of which {free} GiB is free. {other}Including non-PyTorch memory, this process has {ours} GiB memory in use. Of"
)
OOM += (
    " the allocated memory {used} GiB is allocated by PyTorch, and {idle} GiB is reserved by PyTorch but unallocated.\n"
)


@pytest.mark.parametrize(
    ("sizes", "cause"),
    [
        ({"asked": 4, "free": 1, "other": "", "ours": 78, "used": 76, "idle": 1}, "cuda-out-of-memory"),
        ({"asked": 4, "free": 1, "other": "", "ours": 78, "used": 60, "idle": 17}, "cuda-oom-fragmentation"),
        ({"asked": 4, "free": 1, "other": "Process 7 has 70 GiB memory in use. ", "ours": 9, "used": 7, "idle": 1},
         "cuda-oom-other-process"),
        ({"asked": 4, "free": 1, "other": "", "ours": 9, "used": 7, "idle": 1}, "cuda-oom-other-process"),
    ],
)  # fmt: skip
def test_out_of_memory_is_told_apart_by_its_numbers(sizes: dict[str, object], cause: str) -> None:
    found = decide(scan(io.BytesIO(OOM.format(**sizes).encode())))
    assert found[0].id == cause
    assert "GiB" in found[0].notes[0]


def test_a_cause_is_joined_with_what_the_machine_has() -> None:
    raw = b"RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's"
    raw += b" workers are out of shared memory. Please try to raise your shared memory limit.\n"
    found = decide(scan(io.BytesIO(raw)))
    small = changed(RECORDINGS["docker"], {"limits.shm_bytes": 64 << 20})
    told = explained(found, lambda: small)[0]
    assert told.id == "dataloader-shm"
    assert "64.0 MiB" in told.machine[0]
    assert explained(found, lambda: RECORDINGS["docker"])[0].machine == ()
    assert explained(found, None)[0].machine == ()


def test_findings_that_causes_name_are_the_doctors() -> None:
    from hotloop.doctor.finding import catalogue

    assert set(catalogue()) >= IDS
    assert examine(RECORDINGS["no GPU"])


def test_an_error_that_is_not_known_says_where_it_is_from() -> None:
    raw = b"""Traceback (most recent call last):
  File "/home/ml/train.py", line 12, in <module>
    main()
  File "/opt/venv/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 700, in __next__
    data = self._next_data()
acme.PlumbusError: the plumbus is not calibrated
"""
    told = explained(decide(scan(io.BytesIO(raw))), None)
    assert [(one.id, one.area) for one in told] == [("unknown", "data loading")]
    assert told[0].evidence[0].text == "acme.PlumbusError: the plumbus is not calibrated"


STEPS = "".join(f"step {number} loss 0.3\n" for number in range(60))
KEY_ERROR = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    x[1]\nKeyError: 1\n'
FULL = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (KEY_ERROR + "Training script finished\nJob done\n", "unknown"),
        (KEY_ERROR + "wandb: epoch 3\nwandb: train/loss 0.31\nJob 4411 finished at noon\n", "unknown"),
        (KEY_ERROR + "rank 1 exited with code 0\n" * 3, "unknown"),
        ("Downloading done\n" + KEY_ERROR + "step 3 loss 1\nstep 4 loss 2\n", "unknown"),
        ("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.\nSaving model checkpoint\n", "gpu-lost"),
        (STEPS + "test error 0.12, fatal=0, killed: 0\nrun finished\n", "healthy"),
        (FULL + "batch size 64 -> 32\n" + STEPS, "healthy"),
        (FULL + "batch size 64 -> 32\n" + STEPS + "training finished\n", "healthy"),
        (STEPS + FULL, "cuda-out-of-memory"),
        ("max locked memory (kbytes, -l) unlimited\n" + KEY_ERROR, "unknown"),
        ("Running on preemptible instance a2-highgpu-1g\n" + KEY_ERROR, "unknown"),
        ("Evicted 12 entries from the sample cache\n" + KEY_ERROR, "unknown"),
        ("lr scale is 0.5\nbest_val_loss: inf\nfound NaN in 3 rows, dropped\n" + STEPS, "healthy"),
        (
            '{"log":"FileNotFoundError: [Errno 2] No such file or directory: x\\n","stream":"stderr"}\n',
            "file-not-found",
        ),
        (
            "requests.exceptions.SSLError: HTTPSConnectionPool(host='a.b', port=443): Max retries exceeded with url: /"
            " (Caused by SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] no issuer')))\n",
            "tls-certificate",
        ),
        ("RuntimeError: NCCL error in: x.cpp:13\nLast error:\nCuda failure 2 'out of memory'\n", "cuda-out-of-memory"),
        ("RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.\n", "no-visible-gpu"),
        ("\ufeffModuleNotFoundError: No module named 'x'\n", "module-missing"),
    ],
)
def test_ends_are_told_from_what_is_said_at_ends(raw: str, cause: str) -> None:
    assert first(raw.encode()) == cause


KILLED = "run.sh: line 2: 4711 Killed                  python train_retry.py\n"
TAKEN = KEY_ERROR.replace("KeyError: 1", "OSError: [Errno 98] Address already in use")
STOPPED = '^CTraceback (most recent call last):\n  File "a.py", line 3, in <module>\n    step()\nKeyboardInterrupt\n'
LOST = KEY_ERROR.replace("KeyError: 1", "OSError: [Errno 5] Input/output error")
KERNEL = "[ 812.1] Out of memory: Killed process 4711 (python) total-vm:91422344kB\n"
AGAIN = "restarting all ranks\n"


@pytest.mark.parametrize(
    ("raw", "order"),
    [
        (KILLED + TAKEN, ["rank-died", "torchrun-port-in-use"]),
        (TAKEN + KILLED, ["torchrun-port-in-use", "rank-died"]),
        (KILLED + TAKEN + KERNEL, ["host-out-of-memory", "rank-died", "torchrun-port-in-use"]),
        (KILLED + AGAIN + KERNEL, ["host-out-of-memory", "rank-died"]),
        (KILLED + AGAIN + STEPS + TAKEN, ["torchrun-port-in-use", "rank-died"]),
        (KILLED + AGAIN + FULL, ["rank-died", "cuda-out-of-memory"]),
        (KILLED + FULL, ["cuda-out-of-memory", "rank-died"]),
        (FULL + KILLED + AGAIN + FULL, ["cuda-out-of-memory", "rank-died"]),
        (STOPPED + LOST, ["interrupted", "storage-error"]),
        (LOST + STOPPED, ["storage-error", "interrupted"]),
        (STOPPED + STEPS + LOST, ["storage-error", "interrupted"]),
        (STOPPED + FULL, ["cuda-out-of-memory", "interrupted"]),
    ],
)
def test_what_comes_of_a_likely_cause_stands_behind_it(raw: str, order: list[str]) -> None:
    assert [one.id for one in decide(scan(io.BytesIO(raw.encode())))] == order


OF_RANK_0 = "".join(f"[rank0]: {line}\n" for line in KEY_ERROR.splitlines())
OTHERS = {
    "a collective": "[rank1]:[E1122 10:22:11.1 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum=47, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600012"
    " milliseconds",
    "the store": "[rank1]: torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
    "a socket": "[rank1]: socketPollConnect: connect to 10.0.0.1<51235> returned Connection refused, exceeded error"
    " retry count after 35 attempts",
    "being killed": "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 1235)",
}


@pytest.mark.parametrize("waited_for", OTHERS)
def test_an_error_of_the_script_stands_before_what_the_other_ranks_say_of_it(waited_for: str) -> None:
    raw = STEPS + OF_RANK_0 + OTHERS[waited_for] + "\n"
    found = decide(scan(io.BytesIO(raw.encode())))
    assert [(one.id, one.evidence[-1].text) for one in found] == [("unknown", "KeyError: 1")]


def test_what_python_ignored_is_not_what_the_others_waited_for() -> None:
    ignored = "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f2a>\n"
    ignored += KEY_ERROR.replace("KeyError: 1", "AssertionError: can only test a child process")
    assert first((STEPS + ignored + OTHERS["a collective"] + "\n").encode()) == "nccl-timeout"


def test_causes_lead_to_causes() -> None:
    assert {id_ for cause in causes().values() for id_ in cause.leads_to} <= set(causes())


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_logs_in_utf_16_without_its_mark_say_the_same(encoding: str) -> None:
    for log in listed("composed"):
        text = (LOGS / "composed" / log["file"]).read_text(errors="replace")
        assert first(text.encode(encoding)) == log["cause"], log["file"]
    assert first(("Épreuve 訓練 \n" + FULL * 9).encode(encoding)[1:]) == "cuda-out-of-memory"  # cut in the middle


@pytest.mark.parametrize(
    "raw",
    [
        b"".join(number.to_bytes(2, "little") for number in range(256)) * 200,
        b"".join((number * 7 % 256).to_bytes(2, "big") for number in range(20_000)),
        b"\0" * 5000,
        b"\x01\0" * 5000,
    ],
)
def test_numbers_of_two_bytes_are_no_text(raw: bytes) -> None:
    with pytest.raises(NotText):
        first(raw)


def jsoned(message: str, **more: object) -> bytes:
    return json.dumps({"time": "2026-11-20T08:00:00Z", "message": message, **more}).encode() + b"\n"


def test_lines_within_a_line_of_json_are_looked_at_one_by_one() -> None:
    step = jsoned("step 1 loss 0.3")
    for raw in (jsoned("training failed\n" + KEY_ERROR + FULL), jsoned("training failed", exc_info=KEY_ERROR + FULL)):
        found = decide(scan(io.BytesIO(step * 3 + raw + jsoned("bye"))))
        assert found[0].id == "cuda-out-of-memory"
        line = found[0].evidence[0]
        assert (line.number, line.part) == (4, 6)
        assert line.text == FULL.strip()
    unknown = decide(scan(io.BytesIO(step + jsoned("failed", exception=KEY_ERROR))))
    assert [(one.id, one.evidence[0].text) for one in unknown] == [("unknown", "KeyError: 1")]
    docker = json.dumps({"log": FULL, "stream": "stderr"}).encode() + b"\n"
    assert decide(scan(io.BytesIO(step + docker)))[0].evidence[0].place == (2, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8")), max_size=5), st.binary(max_size=40))
def test_lines_of_json_give_back_what_was_put_in(texts: list[str], noise: bytes) -> None:
    message = "\n".join(texts)
    expected = message.rstrip().split("\n")
    assert message_lines(json.dumps({"msg": message}).encode()) == (
        [line.encode() for line in expected] if len(expected) > 1 else []
    )
    assert message_lines(b"{" + noise) == message_lines(b"[" + noise + b"]") == []


def test_lines_are_counted_by_their_ends_alone() -> None:
    found = decide(scan(io.BytesIO(b"a\r" * 500 + b"b\r\n" + FULL.encode())))
    assert found[0].evidence[0].number == 2


@pytest.mark.parametrize(
    "raw", [b"Rank  ran  but " * 1000, b"1234567890" * 2000, b"x" * 20_000_000, b"a\r" * 2_000_000]
)
def test_odd_lines_take_no_long_time(raw: bytes) -> None:
    assert first(raw + b"\n") in ("healthy", "unknown")  # an expression that runs away would take minutes


def test_memory_of_ones_own_that_is_listed_by_the_hosts_number_is_no_others() -> None:
    raw = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11"
    raw += " GiB of which 0.14 GiB is free. Process 4834 has 79.00 GiB memory in use. Of the allocated memory 78.10 GiB"
    raw += " is allocated by PyTorch, and 0.30 GiB is reserved by PyTorch but unallocated.\n"
    assert first(raw.encode()) == "cuda-out-of-memory"
