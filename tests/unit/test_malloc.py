"""The C library's settings of what becomes of freed memory."""

import subprocess
import sys

import pytest

from hotloop.attach.malloc import can_keep

pytestmark = pytest.mark.skipif(
    not can_keep(), reason="the C library has no such settings, or the environment sets them"
)

STEPS = """
import resource
from ctypes import CDLL, c_size_t, c_void_p, memset
from hotloop.attach.malloc import keep_freed
library = CDLL(None)
library.malloc.restype, library.malloc.argtypes, library.free.argtypes = c_void_p, [c_size_t], [c_void_p]

def faults(blocks):
    before = 0
    for step in range(12):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [library.malloc(2**23) for _ in range(blocks)]
        for each in held:
            memset(each, 1, 2**23)
        for each in held:
            library.free(each)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10

print(faults({blocks}))
keep_freed(True)
print(faults({blocks}))
keep_freed(False)
print(faults({blocks}))
"""


@pytest.mark.slow
def test_what_a_training_frees_stays_its_own_and_switched_off_it_is_no_worse_than_before() -> None:
    """One block of 8 MiB is kept by glibc itself, once it has seen it; twenty are not."""
    for blocks, pages in ((1, 0), (20, 20 * 2048)):
        text = STEPS.replace("{blocks}", str(blocks))
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
        before, kept, after = map(int, done.stdout.split())
        assert before >= 0.9 * pages
        assert kept <= 20
        assert after <= before + 20


def test_who_has_set_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert not can_keep()
