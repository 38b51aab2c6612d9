"""The doctor's checks over recorded machines, healthy and faulty."""

from itertools import combinations

import pytest
from machine_faults import ALL, OF_BARE_METAL
from recordings import NOT_HEALTHY, RECORDINGS, Changes, changed

from hotloop.doctor.examine import examine
from hotloop.doctor.expect import expected
from hotloop.doctor.finding import GROUPS, catalogue
from hotloop.doctor.readers.devices import _acs_control
from hotloop.doctor.record import MachineRecord, Rate

FAULTS = [(recording, id_, changes) for recording, faults in ALL.items() for id_, changes in faults.items()]


def ids(record: MachineRecord) -> set[str]:
    return {one.id for one in examine(record)}


@pytest.mark.parametrize("name", sorted(RECORDINGS.keys() - NOT_HEALTHY))
def test_healthy_machines_have_notes_at_most(name: str) -> None:
    assert [one for one in examine(RECORDINGS[name]) if one.level != "note"] == []


def test_there_are_as_many_recordings_and_faults_as_promised() -> None:
    assert len(RECORDINGS) >= 12
    assert len(FAULTS) >= 60


@pytest.mark.parametrize(("recording", "id_", "changes"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_each_fault_is_found_by_its_id(recording: str, id_: str, changes: Changes) -> None:
    record = changed(RECORDINGS[recording], changes)
    found = next((one for one in examine(record) if one.id == id_), None)
    assert found, ids(record)
    assert found.evidence
    assert found.fix


def test_every_id_of_the_catalogue_has_a_fault_that_shows_it() -> None:
    assert {id_ for _, id_, _ in FAULTS} == set(catalogue())
    assert {one.group for one in catalogue().values()} == set(GROUPS)


SILENT = {"driver-missing", "nouveau-loaded", "nvml-driver-mismatch", "nvml-failed"}
"""Nothing is known of a card whose driver does not answer."""
OF_CARDS = {"gpu-not-seen", "few-processors", "visible-devices-invalid", "no-visible-gpu", "peermem-missing",
            "card-driver-branch", "cuda-driver-too-old", "driver-limited", "arch-list", "cuda-no-kernel-image",
            "kernels-from-ptx", "cpu-only-torch", "triton-no-compiler", "triton-no-headers", "toolkit-mismatch",
            "tensorflow-cpu-only", "tensorflow-no-gpu", "tensorflow-driver-too-old", "nccl-p2p-disabled",
            "driver-missing", "nouveau-loaded", "cuda-forward-compat", "device-files-missing", "numa-remote",
            "iommu-on", "permission-denied-device"}  # fmt: skip
ONE_OF = [
    {"torch-import-failed", "cpu-only-torch", "no-visible-gpu", "cuda-no-kernel-image", "kernels-from-ptx"},
    {"torch-missing", "cuda-driver-too-old", "driver-limited", "triton-no-compiler", "triton-no-headers",
     "toolkit-mismatch"},
    {"numpy-abi", "glibc-too-old"},  # the older torch of the one asks for less of the C library
    {"cpu-only-torch", "cuda-no-kernel-image", "kernels-from-ptx", "no-visible-gpu", "cuda-driver-too-old",
     "driver-limited", "triton-no-compiler", "triton-no-headers", "toolkit-mismatch"},
    {"thermal-throttle", "gpu-hot", "hardware-slowdown", "power-brake"},
    {"mig-empty", "mig-several", "gpu-in-use", "gpu-memory-held"},
    {"vgpu", "pcie-width", "pcie-generation", "pcie-replays"},
    {"cpu-quota", "too-many-threads"},
    {"cuda-driver-too-old", "driver-limited", "card-driver-branch", "cuda-forward-compat", "tensorflow-driver-too-old"},
    {"nvml-driver-mismatch", "nvml-failed"},
    {"nvml-failed", "device-files-missing", "permission-denied-device", "device-file-failed"},
    {"peer-access-off", "mig-empty", "mig-several"},
    {"data-slow", "data-on-hdd"},
    {"peer-access-off", "iommu-on", "acs-on", "mig-empty", "mig-several"},
    {"shm-small", "shm-full"},
]  # fmt: skip
"""Where the first is the case the others cannot be told, or are no longer so: no fault of the other's is hidden."""


def conflict(one: str, other: str) -> bool:
    """Whether two faults say different things of one part of the machine."""
    pair = {one, other}
    if any(pair <= group for group in ONE_OF) or (pair & SILENT and pair & OF_CARDS):
        return True
    paths = [set(OF_BARE_METAL[id_]) for id_ in (one, other)]
    return any(a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.") for a in paths[0] for b in paths[1])


def test_no_fault_hides_another() -> None:
    bare, pairs, hidden = RECORDINGS["bare metal"], 0, []
    for one, other in combinations(OF_BARE_METAL, 2):
        if conflict(one, other):
            continue
        pairs += 1
        found = ids(changed(bare, {**OF_BARE_METAL[one], **OF_BARE_METAL[other]}))
        hidden += [(one, other, missing) for missing in {one, other} - found]
    assert hidden == []
    assert pairs > 3000


@pytest.mark.parametrize(
    ("name", "gpu", "should"),
    [
        ("matrix product, bf16", {}, 774.0),
        ("matrix product, bf16", {"name": "NVIDIA H100 80GB HBM3"}, 989 * 0.783),
        ("matrix product, bf16", {"name": "NVIDIA GeForce RTX 4090"}, 165.2 * 0.783),
        ("matrix product, bf16", {"name": "Quadro K620"}, None),
        ("matrix product, bf16", {"mig": True}, None),
        ("host to device, page-locked", {"pcie_generation_max": 4, "pcie_width_max": 8}, 0.86 * 8 * 1.969),
    ],
)
def test_what_a_probe_should_find_comes_from_card_and_link(
    name: str, gpu: dict[str, object], should: float | None
) -> None:
    h200 = RECORDINGS["H200"]
    card = h200.gpus[0].model_dump() | gpu
    assert h200.torch
    devices = (card["name"], *h200.torch.devices[1:])
    machine = changed(h200, {"gpus": (card,), "torch.devices": devices})
    found = expected(Rate(name=name, gpu=0, value=1.0), machine)
    assert found.expected == (None if should is None else pytest.approx(should))
    assert bool(found.source) == (should is not None)


LINKED = Rate(name="NCCL all-reduce over 2 GPUs, bus", value=1.0)
OF_A100 = {"name": "NVIDIA A100-SXM4-40GB", "capability": "8.0", "nvlinks": 12, "nvlinks_active": 12}
A100 = {f"gpus.{number}.{key}": value for number in (0, 1) for key, value in OF_A100.items()}


@pytest.mark.parametrize(
    ("changes", "should", "said"),
    [
        ({}, 0.72 * 18 * 25, "18 NVLinks of 25 GB/s"),
        ({"gpus.1.nvlinks_active": 9}, 0.72 * 9 * 25, "9 NVLinks"),
        (A100, 0.72 * 12 * 25, "12 NVLinks"),
        ({**A100, "pairs.0.nvlinks": 4}, 0.72 * 4 * 25, "4 NVLinks"),
        ({"pairs.0.path": "sys"}, None, "not all cards are joined by NVLink"),
        ({"pairs": ()}, None, "not all cards are joined by NVLink"),
        ({"gpus.1.mig": True}, None, "parts of cards"),
        ({"gpus.0.capability": "8.9"}, None, "nobody has said"),
    ],
)
def test_what_nccl_should_reach_comes_from_the_nvlinks(changes: Changes, should: float | None, said: str) -> None:
    found = expected(LINKED, changed(RECORDINGS["H200"], changes))
    assert found.expected == (None if should is None else pytest.approx(should))
    assert said in found.source


@pytest.mark.parametrize(
    ("changes", "should", "said"),
    [
        ({"folders.0.kind": "nvme"}, 1000, "nvme: four lanes of PCIe 3"),
        ({}, 400, "SATA"),
        ({"folders.0.kind": "hdd"}, 100, "7,200 rpm"),
        ({"folders.0.kind": "network"}, 112, "1 Gbit/s"),
        ({"folders.0.kind": "network", "system.virtualization": "kvm"}, 112, "1 Gbit/s"),
        ({"folders.0.kind": "memory"}, None, "its kind (memory)"),
        ({"folders": ()}, None, "its kind (not told)"),
        ({"system.virtualization": "kvm"}, None, "virtual machine"),
    ],
)
def test_what_a_disk_should_reach_comes_from_its_kind(changes: Changes, should: float | None, said: str) -> None:
    found = expected(Rate(name="disk, reading", value=1.0), changed(RECORDINGS["bare metal"], changes))
    assert found.expected == should
    assert said in found.source


@pytest.mark.parametrize(
    ("changes", "should", "said"),
    [
        ({}, 2, "as NVML sees"),
        ({"environment.CUDA_VISIBLE_DEVICES": "1"}, 1, "CUDA_VISIBLE_DEVICES=1"),
        ({"environment.CUDA_VISIBLE_DEVICES": "0,4,1"}, 1, "CUDA_VISIBLE_DEVICES=0,4,1"),
        ({"environment.CUDA_VISIBLE_DEVICES": ""}, 0, "CUDA_VISIBLE_DEVICES= "),
        ({"gpus.0.error": "GPU is lost"}, 1, "as NVML sees"),
        ({"gpus.0.mig": True}, None, "counted otherwise"),
        ({"tensorflow.cuda": ""}, None, "without CUDA"),
        ({"gpus": ()}, None, ""),
    ],
)
def test_tensorflow_should_see_what_is_not_hidden(changes: Changes, should: int | None, said: str) -> None:
    with_it = changed(RECORDINGS["bare metal"], {"tensorflow": {"version": "2.20.0", "cuda": "12.5.1"}})
    found = expected(Rate(name="GPUs that TensorFlow sees", value=0.0), changed(with_it, changes))
    assert found.expected == should
    assert said in found.source


def test_what_a_machine_with_two_h200s_measured_is_what_is_expected() -> None:
    h200 = RECORDINGS["H200"]
    again = h200.model_copy(update={"rates": tuple(expected(rate, h200) for rate in h200.rates)})
    compared = {rate.name for rate in again.rates if rate.expected}
    assert compared >= {"NCCL all-reduce over 2 GPUs, bus", "JPEG decoding on one processor", "device memory"}
    assert [one for one in examine(again) if one.group == "probes"] == []


@pytest.mark.parametrize(("control", "found"), [(0x0, 0), (0x1, 0x1), (0x1D, 0x1D)])
def test_the_acs_register_is_found_along_the_list(control: int, found: int) -> None:
    settings = bytearray(4096)
    settings[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")  # errors, then
    settings[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
    settings[0x14E:0x150] = control.to_bytes(2, "little")
    assert _acs_control(bytes(settings)) == found
    assert _acs_control(bytes(4096)) == 0
