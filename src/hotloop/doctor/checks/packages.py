"""torch, TensorFlow and what they load."""

import re
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from hotloop.doctor.checks.driver import has_driver
from hotloop.doctor.finding import Check, Seen
from hotloop.doctor.record import MachineRecord, Torch
from hotloop.versions.solve import runs
from hotloop.versions.table import Build, Capability, capability_of, current_table

_FIXES = {
    "802": "sudo systemctl enable --now nvidia-fabricmanager",
    "not yet initialized": "sudo systemctl enable --now nvidia-fabricmanager",
    "803": "take cuda-compat out of LD_LIBRARY_PATH, or update the driver",
    "804": "take cuda-compat out of LD_LIBRARY_PATH, or update the driver",
    "unknown error": "sudo nvidia-modprobe -u; sudo dmesg | grep -i nvrm | tail",
}
"""What CUDA says -> what to type."""
_SHARED = {"cudnn", "nccl", "nvshmem", "cusparselt"}
"""Whose files have the same names for each CUDA; those of the toolkit differ by its major version."""


def installed(record: MachineRecord) -> Iterator[Seen]:
    """Torch is there, can be imported, and was built for GPUs."""
    torch = record.torch
    if torch is None:
        if "torch" not in record.unread:
            yield Seen("torch-missing", f"no torch in {record.system.python_path or 'this Python'}")
    elif torch.error:
        yield Seen("torch-import-failed", f"torch {torch.version}: {torch.error}")
    elif not torch.cuda and record.gpus:
        yield Seen("cpu-only-torch", f"torch {torch.version} was built without CUDA; here is {record.gpus[0].name}")


def kernels(record: MachineRecord) -> Iterator[Seen]:
    """The build's kernels against each kind of card."""
    torch = record.torch
    if not (torch and torch.cuda and torch.architectures):
        return
    for capability, name in {gpu.capability: gpu.name for gpu in record.gpus if gpu.capability}.items():
        how = _runs(torch, capability_of(capability))
        held = " ".join(torch.architectures)
        if not how:
            yield Seen("cuda-no-kernel-image", f"{name} is sm_{capability.replace('.', '')}; torch holds {held}",
                       "hotloop resolve")  # fmt: skip
        elif how == "ptx":
            yield Seen("kernels-from-ptx", f"{name} is sm_{capability.replace('.', '')}; torch holds {held}")


def _runs(torch: Torch, card: Capability) -> str:
    numbers = {kind: [] for kind in ("sm", "compute")}  # type: dict[str, list[Capability]]
    for word in torch.architectures:
        kind, _, digits = word.partition("_")
        digits = digits.rstrip("af")
        if kind in numbers and digits.isdigit():
            numbers[kind].append(capability_of(digits))
    build = Build(
        torch.version, torch.cuda, False, (0, 99), "", "", "", "", tuple(numbers["sm"]), tuple(numbers["compute"]),
        "", "", "",
    )  # fmt: skip
    return runs(build, card)


def visible(record: MachineRecord) -> Iterator[Seen]:
    """GPUs that NVML sees and torch does not."""
    torch, chosen = record.torch, record.environment.get("CUDA_VISIBLE_DEVICES")
    count = len(record.gpus)
    if chosen is not None and count:
        parts = [part.strip() for part in chosen.split(",")]
        beyond = [part for part in parts if part.isdigit() and int(part) >= count]
        if beyond:
            evidence = f"CUDA_VISIBLE_DEVICES={chosen}, GPUs 0 to {count - 1}"
            yield Seen("visible-devices-invalid", f"{evidence}: {beyond[0]} and all behind it are left out")
        if chosen in ("", "-1", "NoDevFiles"):
            yield Seen(
                "no-visible-gpu", f'CUDA_VISIBLE_DEVICES="{chosen}" hides {count} GPUs', "unset CUDA_VISIBLE_DEVICES"
            )
            return
    old = "driver on your system is too old" in (torch.cuda_error if torch else "")
    if torch and torch.cuda and not torch.available and not torch.error and _usable(record) and not old:
        fix = next((fix for word, fix in _FIXES.items() if word in torch.cuda_error), "hotloop explain")
        fix = "unset CUDA_VISIBLE_DEVICES" if chosen is not None else fix
        yield Seen("no-visible-gpu", f"NVML sees {count} GPUs, torch: {torch.cuda_error}", fix)


def _usable(record: MachineRecord) -> bool:
    return has_driver(record) and any(not gpu.error for gpu in record.gpus)


def libraries(record: MachineRecord) -> Iterator[Seen]:
    """The copies that were loaded, against those that torch brings."""
    for library in record.torch.libraries if record.torch else ():
        if not library.why:
            continue
        own, loaded = library.expected_version, library.version
        evidence = f"{library.path}{f' ({loaded})' if loaded else ''} by {library.why}; torch's: {library.expected}"
        own_fix = f"see what brings it: ldconfig -p | grep {library.name}; take that folder out of /etc/ld.so.conf.d"
        fix = f"unset {library.why.partition('=')[0]}" if "=" in library.why else own_fix
        older = bool(own and loaded) and _older(loaded, own)
        yield Seen(f"{'cudnn-library-mismatch' if older and library.name == 'libcudnn' else 'library-hijacked'}",
                   evidence + (f" ({own})" if own else ""), fix)  # fmt: skip


def _older(one: str, other: str) -> bool:
    try:
        return Version(one).release[:3] < Version(other).release[:3]
    except InvalidVersion:
        return False


def pins(record: MachineRecord) -> Iterator[Seen]:
    """Packages of other versions than torch asks for, and packages that share a folder."""
    for pin in record.pins:
        # Torch pins down to a build that indexes for one CUDA alone have: 2.11.0+cu128.
        if (
            pin.installed
            and pin.installed.split("+")[0] != pin.asked.split("+")[0]
            and not _same(pin.asked, pin.installed)
        ):
            fix = f'pip install "{pin.package}=={pin.asked}"'
            id_ = "torchvision-mismatch" if pin.package == "torch" else "package-pin"
            yield Seen(id_, f"{pin.package} {pin.installed}, asked for is {pin.asked}",
                       "hotloop resolve" if pin.package == "torch" else fix)  # fmt: skip
    builds = {name: record.packages.get(name, "").partition("+")[2] for name in ("torch", "torchvision")}
    if all(builds.values()) and builds["torch"] != builds["torchvision"]:
        yield Seen("torchvision-mismatch", f"torch is +{builds['torch']}, torchvision +{builds['torchvision']}")
    by_library: dict[str, set[str]] = {}
    for name in record.packages:
        if found := re.fullmatch(r"nvidia-(.+)-cu(11|12|13)", name):
            by_library.setdefault(found[1], set()).add(found[2])
    for library, cudas in by_library.items():
        if len(cudas) > 1 and library in _SHARED:
            names = ", ".join(f"nvidia-{library}-cu{cuda}" for cuda in sorted(cudas))
            yield Seen("packages-overlap", f"{names} lie in one folder")


def _same(asked: str, installed: str) -> bool:
    """13.0.3 is satisfied by 13.0.3.0, as pip has it."""
    try:
        return Version(asked) == Version(installed)
    except InvalidVersion:
        return True


def numpy(record: MachineRecord) -> Iterator[Seen]:
    """NumPy 2 under a torch that was built against NumPy 1."""
    numpy_, torch = record.packages.get("numpy", ""), record.packages.get("torch", "")
    if numpy_.startswith("2") and torch and Version(torch) < Version("2.3"):
        yield Seen("numpy-abi", f"numpy {numpy_} with torch {torch}")


def glibc(record: MachineRecord) -> Iterator[Seen]:
    """The C library against the wheel's."""
    own = record.packages.get("torch", "").split("+")[0]
    needed = {build.glibc for build in current_table().builds if build.torch == own} - {""}
    if record.system.glibc and needed and Version(record.system.glibc) < Version(min(needed, key=Version)):
        yield Seen("glibc-too-old", f"glibc {record.system.glibc}; torch {own} needs {min(needed, key=Version)}")


def compilers(record: MachineRecord) -> Iterator[Seen]:
    """What torch.compile and extensions need."""
    torch, system = record.torch, record.system
    if not (torch and torch.cuda and record.gpus and system.kernel):
        return
    if not system.c_compiler:
        yield Seen("triton-no-compiler", "no gcc, cc or clang in PATH, CC is not set")
    if system.python_headers is False:
        yield Seen("triton-no-headers", f"no Python.h of Python {system.python}")
    if system.nvcc and system.nvcc.split(".")[0] != torch.cuda.split(".")[0]:
        yield Seen("toolkit-mismatch", f"nvcc {system.nvcc}, torch is for CUDA {torch.cuda}")


def tensorflow(record: MachineRecord) -> Iterator[Seen]:
    """TensorFlow's libraries."""
    found = record.tensorflow
    if found is None or not record.gpus:
        return
    if not found.cuda:
        fix = 'pip uninstall tensorflow-cpu; pip install "tensorflow[and-cuda]"'
        without = "tensorflow-cpu" in record.packages
        evidence = f"tensorflow {found.version} was built without CUDA"
        yield Seen("tensorflow-cpu-only", evidence, fix if without else "")
    elif found.missing:
        yield Seen("tensorflow-no-gpu", f"tensorflow {found.version} needs {', '.join(found.missing)}")
    cuda = current_table().cudas.get(".".join(found.cuda.split(".")[:2]))
    if cuda and has_driver(record) and Version(record.driver.version) < Version(cuda.least_driver):
        evidence = f"tensorflow {found.version} is for CUDA {found.cuda}, which needs driver {cuda.least_driver}"
        yield Seen("tensorflow-driver-too-old", f"{evidence}; this one is {record.driver.version}")


CHECKS: tuple[Check, ...] = (
    installed, kernels, visible, libraries, pins, numpy, glibc, compilers, tensorflow,
)  # fmt: skip
