"""Fixtures of all tests, and guards against what a test may leave behind."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from command import Command, Finished, Zygote
from hypothesis import settings
from PIL import Image

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

SUPPORT = Path(__file__).parent / "support"
KINDS = ("unit", "torch", "cli", "ranks", "engines", "gpu", "docs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=1, help="random SIGKILLs in the resume test (50 before a release)")
    parser.addoption("--update-pages", action="store_true", help="rewrite the pinned help pages")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs begin, and what they start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in KINDS:
        config.addinivalue_line("markers", f"{kind}: tests in tests/{kind}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(Path(__file__).parent).parts[0]
        item.add_marker(kind)
        if kind == "gpu":
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test leaves a child process, a thread, a changed environment or another current directory."""
    environment, directory = dict(os.environ), Path.cwd()
    threads = {thread.ident for thread in threading.enumerate()}
    yield
    assert multiprocessing.active_children() == []
    left = [thread for thread in threading.enumerate() if thread.ident not in threads]
    if "torch._inductor" in sys.modules:  # the compiler keeps its pools for as long as the process lives
        pools = ("tqdm_monitor", "ThreadPoolExecutor", "InductorSubproc", "subproc_worker_timer", "Dummy-")
        left = [thread for thread in left if not thread.name.startswith(pools)]
    for thread in left:
        thread.join(5)  # a queue that was closed ends its thread a moment later
    assert [thread.name for thread in left if thread.is_alive()] == []
    assert Path.cwd() == directory
    changed = {key for key in environment.keys() | os.environ.keys() if environment.get(key) != os.environ.get(key)}
    # torch and pytest set these of themselves, once
    assert {key for key in changed if not key.startswith(("PYTEST", "KMP_", "TORCH", "_TORCH", "TRITON"))} == set()


@pytest.fixture
def make_images(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of class folders with pictures whose mean colour tells the class."""

    def make(name: str = "images", classes: int = 2, each: int = 8, size: int = 16) -> Path:
        folder = tmp_path / name
        for label in range(classes):
            for number in range(each):
                random = np.random.default_rng(1000 * label + number)
                pixels = random.integers(0, 80, (size, size, 3)) + np.array([label * 160 // max(1, classes - 1)] * 3)
                file = folder / f"class{label}" / f"{number:03d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(file)
        return folder

    return make


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks processes for commands, torch imported already."""
    with Zygote({**os.environ, **_environment()}) as started:
        yield started


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    return {"NO_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": path}


@pytest.fixture
def hotloop(tmp_path: Path, zygote: Zygote) -> Command:
    """Runs `hotloop ARGUMENTS` in an empty folder, as a user does: in a process of its own."""

    def call(*arguments: str, expect: int | None = None, timeout: float = 120) -> Finished:
        finished = zygote.run(arguments, tmp_path, {**os.environ, **_environment()}, timeout)
        assert expect in (None, finished.code), finished
        return finished

    return call
