import errno
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.core.errors import DamagedSample, InputError, WorkerError
from hotloop.data import pool
from hotloop.data.dataset import Dataset, Field, read_sample
from hotloop.data.loader import Batch, Loaders, LoaderSettings, batches_ahead, workers_for
from hotloop.data.ring import Ring


class Numbers(Dataset):
    """Sample i is i, a draw, and an array filled with i."""

    def __init__(
        self, samples: int, damaged: tuple[int, ...] = (), broken: int = -1, deadly: int = -1, ragged: int = -1
    ) -> None:
        self.samples = samples
        self.damaged = damaged
        self.broken = broken
        self.deadly = deadly
        self.ragged = ragged

    def __len__(self) -> int:
        return self.samples

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        if index in self.damaged:
            raise DamagedSample(f"number {index}", "it is damaged")
        if index == self.broken:
            raise ZeroDivisionError("a fault of the data set's own")
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        size = 3 if index == self.ragged else 4
        return {"number": np.array(index), "draw": np.array(random.random()), "array": np.full(size, index, np.int32)}

    def fingerprint(self) -> str:
        return str(self.samples)


def copies(batches: list[Batch]) -> list[tuple[tuple[int, ...], list[float]]]:
    return [(batch.indices, batch.arrays["draw"].tolist()) for batch in batches]


def run(
    dataset: Dataset, workers: int, epoch: int = 0, start: int = 0, epochs: int = 1, **options: object
) -> list[Batch]:
    """Batches with their arrays copied, so that they outlive the ring."""
    loader_settings = LoaderSettings(batch_size=8, seed=5, **options)  # type: ignore[arg-type]
    with Loaders([(dataset, loader_settings)], workers) as (loader,):
        return [
            Batch(
                {name: array.copy() for name, array in batch.arrays.items()}, batch.indices, batch.epoch, batch.number
            )
            for batch in loader.batches(epoch, start, epochs)
        ]


def test_an_epoch_has_every_sample_once_and_what_the_arrays_say() -> None:
    batches = run(Numbers(45), workers=1)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(45))
    assert [batch.size for batch in batches] == [8, 8, 8, 8, 8, 5]
    for batch in batches:
        assert batch.arrays["number"].tolist() == list(batch.indices)
        assert batch.arrays["array"].tolist() == [[index] * 4 for index in batch.indices]


def test_a_short_last_batch_can_be_left_out() -> None:
    assert [batch.size for batch in run(Numbers(45), workers=0, drop_last=True)] == [8] * 5


def test_order_and_draws_do_not_depend_on_workers_or_on_where_it_starts() -> None:
    dataset = Numbers(45, damaged=(3, 7))
    expected = copies(run(dataset, workers=0, epochs=3))
    for workers in (1, 2, 5):
        assert copies(run(dataset, workers, epochs=3)) == expected
    assert copies(run(dataset, workers=2, epoch=1, start=4, epochs=2)) == expected[6 + 4 :]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 60), st.integers(0, 3), st.integers(0, 7))
def test_resuming_anywhere_gives_the_rest(samples: int, epoch: int, start: int) -> None:
    whole = copies(run(Numbers(samples), workers=0, epoch=epoch))
    assert copies(run(Numbers(samples), workers=0, epoch=epoch, start=start)) == whole[start:]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_parts_of_batches_are_the_batches(samples: int, batch_size: int, parts: int, shuffle: bool) -> None:
    several = [LoaderSettings(batch_size, shuffle=shuffle, part=part, parts=parts) for part in range(parts)]
    for number in range(several[0].batches(samples)):
        size = several[0].size(number, samples)
        counted = [settings.counted(number, samples) for settings in several]
        assert sum(counted) == size
        assert max(counted) - min(counted) <= 1
        places = [settings.places(number, samples) for settings in several]
        real = [place for each, some in zip(places, counted, strict=True) if some for place in each]
        assert real == list(range(number * batch_size, number * batch_size + size)), "each once, in order"
        assert all(len(each) <= settings.part_size for each, settings in zip(places, several, strict=True))
        stood_in = [each for each, some in zip(places, counted, strict=True) if not some]
        assert all(list(each) == [number * batch_size] for each in stood_in), "every process takes every step"


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_have_the_draws_of_the_whole(workers: int) -> None:
    whole = {index: draw for batch in copies(run(Numbers(45), 0)) for index, draw in zip(*batch, strict=True)}
    parts = [batch for part in range(3) for batch in copies(run(Numbers(45), workers, part=part, parts=3))]
    assert {index: draw for batch in parts for index, draw in zip(*batch, strict=True)} == whole


@given(st.floats(0, 2**33), st.integers(2, 8192))
def test_more_batches_lie_ahead_of_several_processes_in_a_bound_of_memory(part_bytes: float, parts: int) -> None:
    ahead = batches_ahead(part_bytes, parts)
    assert batches_ahead(part_bytes, 1) <= ahead <= batches_ahead(0, parts)
    assert ahead == batches_ahead(part_bytes, 1) or (1 + ahead) * part_bytes <= 1.5 * 2**30


def test_damaged_samples_are_replaced_counted_and_named() -> None:
    with Loaders([(Numbers(20, damaged=(3, 7)), LoaderSettings(batch_size=8))], 2) as (loader,):
        sizes = [batch.size for batch in loader.batches()]
        assert sizes == [8, 8, 4]
        assert loader.damages == {"number 3": "it is damaged", "number 7": "it is damaged"}


def test_damaged_samples_are_left_out_where_nothing_may_count_twice() -> None:
    batches = run(Numbers(20, damaged=(3, 7)), workers=1, shuffle=False, on_damaged="drop")
    indices = [index for batch in batches for index in batch.indices]
    assert indices == [index for index in range(20) if index not in (3, 7)]
    assert [int(number) for batch in batches for number in batch.arrays["number"]] == indices


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_sample_can_stop_the_run(workers: int) -> None:
    with pytest.raises(DamagedSample, match="number 3"):
        run(Numbers(20, damaged=(3,)), workers, on_damaged="raise")


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_is_all_damaged_is_refused(workers: int) -> None:
    with pytest.raises(InputError, match=r"(?s)all 99 drawn in its place.*data\.train=.*data\.val="):
        run(Numbers(20, damaged=tuple(range(20))), workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_of_the_data_set_arrives_with_its_traceback(workers: int) -> None:
    with pytest.raises(WorkerError, match="ZeroDivisionError: a fault of the data set's own"):
        run(Numbers(40, broken=30), workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_of_another_shape_is_named(workers: int) -> None:
    with pytest.raises(
        WorkerError, match=r"array of sample 30 has shape \(3,\) of int32, the first sample's is \(4,\) of int32"
    ):
        run(Numbers(40, ragged=30), workers)


def test_a_sample_that_kills_its_worker_is_named_after_three_tries() -> None:
    with pytest.raises(WorkerError, match="died 3 times") as caught:
        run(Numbers(40, deadly=30), workers=2)
    assert "exit code was -9" in caught.value.cause


def test_workers_that_are_killed_are_replaced_and_nothing_changes() -> None:
    expected = copies(run(Numbers(200), workers=0, epochs=2))
    told: list[int] = []
    with Loaders([(Numbers(200), LoaderSettings(8, seed=5))], 2, on_death=told.append) as (loader,):
        seen = []
        for batch in loader.batches(epochs=2):
            seen.append((batch.indices, batch.arrays["draw"].tolist()))
            if len(seen) % 10 == 5:
                os.kill(loader._pool._workers[0].process.pid or 0, signal.SIGKILL)
        assert seen == expected
    assert told == [-signal.SIGKILL] * 5


def test_a_consumer_may_leave_in_the_middle_and_come_again() -> None:
    with Loaders([(Numbers(80), LoaderSettings(8, seed=5))], 2) as (loader,):
        for batch in loader.batches():
            if batch.number == 2:
                break
        assert len(list(loader.batches(epoch=1))) == 10
        assert len(list(loader.batches(epoch=2))) == 10


def test_loaders_share_workers_without_mixing() -> None:
    first, second = Numbers(30), Numbers(50)
    with Loaders([(first, LoaderSettings(8, seed=5)), (second, LoaderSettings(10, shuffle=False))], 2) as (a, b):
        order = []
        for batch in a.batches():
            order += batch.arrays["number"].tolist()
            if batch.number == 1:
                assert [int(n) for other in b.batches() for n in other.arrays["number"]] == list(range(50))
        assert sorted(order) == list(range(30))


def test_two_threads_may_each_have_a_loader() -> None:
    expected = copies(run(Numbers(200), workers=0, epochs=3))
    seen: dict[int, list[tuple[tuple[int, ...], list[float]]]] = {0: [], 1: []}
    settings = LoaderSettings(8, seed=5)
    with Loaders([(Numbers(200), settings), (Numbers(200), settings)], 2) as loaders:

        def read(number: int) -> None:
            for batch in loaders[number].batches(epochs=3):
                seen[number].append((batch.indices, batch.arrays["draw"].tolist()))

        threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert seen == {0: expected, 1: expected}


def test_a_second_iteration_waits_for_the_first_to_be_closed() -> None:
    with Loaders([(Numbers(80), LoaderSettings(8))], 1) as (loader,):
        first = loader.batches()
        next(first)
        with pytest.raises(RuntimeError, match="iterated over already"):
            next(loader.batches())
        first.close()
        assert len(list(loader.batches())) == 10


@pytest.mark.parametrize("damaged", [(), tuple(range(1, 12_000, 2))], ids=["whole", "half damaged"])
def test_huge_batches_do_not_lock_up(damaged: tuple[int, ...]) -> None:
    """Requests and answers of hundreds of kilobytes: more than a pipe holds."""
    with Loaders([(Numbers(12_000, damaged=damaged), LoaderSettings(6_000))], 1) as (loader,):
        assert [batch.size for batch in loader.batches(epochs=3)] == [6_000] * 6
        assert len(loader.damages) == len(damaged)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_cannot_be_started_again_ends_the_run(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with Loaders([(Numbers(400), LoaderSettings(8))], workers) as (loader,):
        batches = loader.batches()
        next(batches)
        monkeypatch.setattr(loader._pool._context, "Process", fails)
        for worker in loader._pool._workers:
            os.kill(worker.process.pid or 0, signal.SIGKILL)
        for rest in (batches, loader.batches()):
            with pytest.raises(WorkerError, match="could not be started"):
                list(rest)


def test_a_worker_that_is_killed_before_it_has_its_data_is_replaced() -> None:
    with Loaders([(Numbers(40), LoaderSettings(8))], 1) as (loader,):
        os.kill(loader._pool._workers[0].process.pid or 0, signal.SIGKILL)
        assert len(list(loader.batches())) == 5


class Crashing(Numbers):
    """As a library that crashes where a worker opens it."""

    def in_worker(self) -> Dataset:
        os.kill(os.getpid(), signal.SIGKILL)
        return self


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_die_before_they_have_their_data_are_not_replaced_for_ever(workers: int) -> None:
    with (
        Loaders([(Crashing(40), LoaderSettings(8))], workers) as (loader,),
        pytest.raises(WorkerError, match="died 3 times before they had taken their data"),
    ):
        list(loader.batches())


class Unloadable:
    def __reduce__(self) -> tuple[object, tuple[int, int]]:
        return divmod, (1, 0)


class OddReason(Numbers):
    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        if index == 3:
            damaged = DamagedSample("number 3", "it is damaged")
            damaged.reason = Unloadable()  # type: ignore[assignment]
            raise damaged
        return super().sample(index, random)


def test_an_answer_that_cannot_be_read_ends_the_run() -> None:
    with pytest.raises(WorkerError) as caught:
        run(OddReason(40), workers=1)
    assert "ZeroDivisionError" in caught.value.cause


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_sample_may_be_named_by_objects(workers: int) -> None:
    with Loaders([(Objects(20), LoaderSettings(8))], workers) as (loader,):
        assert [batch.size for batch in loader.batches()] == [8, 8, 4]
        assert loader.damages == {"a/3": "[Errno 5] Input/output error"}


class Objects(Numbers):
    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        if index == 3:
            raise DamagedSample(Path("a/3"), OSError(5, "Input/output error"))
        return super().sample(index, random)


class Slow(Numbers):
    """From sample 8 on each takes a minute."""

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        if index >= 8:
            time.sleep(60)
        return super().sample(index, random)


def test_a_worker_that_cannot_be_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a mount holds in the kernel."""
    monkeypatch.setattr(pool, "_END_SECONDS", 0.1)
    monkeypatch.setattr(pool, "_KILLED_SECONDS", 0.1)
    with Loaders([(Slow(80), LoaderSettings(8, shuffle=False))], 1) as (loader,):
        next(loader.batches())
        (worker,) = (each.process for each in loader._pool._workers)
        kill = worker.kill
        monkeypatch.setattr(worker, "kill", lambda: None)
    assert worker not in multiprocessing.active_children(), "or Python would wait for it at its end"
    assert worker.is_alive()
    kill()
    worker.join()


@pytest.mark.parametrize("place", ["in the loader", "in the body"])
def test_ctrl_c_waits_for_no_slow_sample_and_workers_end_together(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_END_SECONDS", 1.0, raising=False)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with (
            suppress(KeyboardInterrupt),
            Loaders([(Slow(80), LoaderSettings(8, shuffle=False))], 4) as (loader,),
        ):
            batches = loader.batches()
            next(batches)
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            if place == "in the loader":
                next(batches)
            try:
                time.sleep(60)
            finally:
                batches.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 4


def test_who_waits_for_a_slow_sample_hears_of_it_and_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_END_SECONDS", 1.0)
    monkeypatch.setattr(pool, "_PATIENCE_SECONDS", 0.05)
    heard: list[tuple[float, list[str]]] = []
    first_is_there = False

    def leave(seconds: float, names: list[str]) -> None:
        heard.append((seconds, names))
        if first_is_there and len(heard) >= 3:
            raise TimeoutError("enough")

    with Loaders([(Slow(80), LoaderSettings(8, shuffle=False))], 1, leave) as (loader,):
        batches = loader.batches()
        assert next(batches).size == 8
        heard.clear()
        first_is_there = True
        with pytest.raises(TimeoutError, match="enough"):
            next(batches)
    assert [names for _, names in heard] == [["sample 8"]] * 3
    seconds = [seconds for seconds, _ in heard]
    assert seconds == sorted(seconds)


class Stalling(Numbers):
    """Sample 5 comes from a pipe that nobody writes to, as from a mount that hangs."""

    def __init__(self, pipe: Path) -> None:
        super().__init__(8)
        self.pipe = pipe

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        if index == 5:
            self.pipe.read_bytes()
        return super().sample(index, random)


@pytest.mark.parametrize("damaged", [(), (2, 4)])
def test_the_sample_that_does_not_come_is_named_itself(
    tmp_path: Path, damaged: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_PATIENCE_SECONDS", 0.05)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    dataset = Stalling(pipe)
    dataset.damaged = damaged

    def until_named(seconds: float, names: list[str]) -> None:
        if names == ["sample 5"]:
            raise TimeoutError
        assert seconds < 30, names

    with Loaders([(dataset, LoaderSettings(8, shuffle=False, on_damaged="drop"))], 1, until_named) as (loader,):
        batches = loader.batches()
        with pytest.raises(TimeoutError):
            next(batches)
        with pipe.open("wb"):
            pass  # the worker goes on, and ends with the others


def test_an_iteration_that_was_interrupted_can_be_followed_by_another() -> None:
    class Interrupted(Numbers):
        def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
            if index == 12 and interrupts:
                raise interrupts.pop()
            return super().sample(index, random)

    interrupts = [KeyboardInterrupt()]
    with Loaders([(Interrupted(40), LoaderSettings(8))], 0) as (loader,):
        with pytest.raises(KeyboardInterrupt):
            list(loader.batches())
        assert len(list(loader.batches())) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_end_with_their_loaders(workers: int) -> None:
    with Loaders([(Numbers(16), LoaderSettings(8))], workers) as (loader,):
        begun, closed = loader.batches(), loader.batches()
        next(begun)
        begun.close()
        next(closed)
    closed.close()
    for batches in (loader.batches(), begun_after_exit(workers)):
        with pytest.raises(RuntimeError, match="workers have ended"):
            next(batches)


def begun_after_exit(workers: int) -> Generator[Batch]:
    with Loaders([(Numbers(16), LoaderSettings(8))], workers) as (loader,):
        batches = loader.batches()
        next(batches)
    return batches


class NotHere(Numbers):
    def __setstate__(self, state: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/scratch/data.h5")


def test_a_data_set_that_does_not_arrive_is_told_with_its_error() -> None:
    with pytest.raises(WorkerError, match="cannot unpickle") as caught:
        run(NotHere(20), workers=2)
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/scratch/data.h5'" in caught.value.cause


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_somebody_elses_order(workers: int) -> None:
    asked = [[3, 3, 1], [7], [2, 0, 5, 6, 4]]
    with Loaders([(Numbers(8), LoaderSettings(5))], workers) as (loader,):
        found = [(batch.indices, batch.arrays["draw"].tolist()) for batch in loader.batches_of(iter(asked))]
        again = [batch.arrays["draw"].tolist() for batch in loader.batches_of(asked, first=3)]
    assert [list(indices) for indices, _ in found] == asked
    draws = [draw for _, each in found for draw in dict.fromkeys(each)] + [draw for each in again for draw in set(each)]
    assert len(set(draws)) == len(draws), "each batch draws anew"


def test_a_script_without_a_guard_is_not_run_by_workers_that_need_nothing_of_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            print("trains")
            import test_loader
            from hotloop.data.loader import Loaders, LoaderSettings
            settings = LoaderSettings(4)
            with Loaders([(test_loader.Numbers(8), settings)], 2, imports_main=False) as (loader,):
                print(sum(batch.size for batch in loader.batches()), sys.modules["__main__"].__file__ == __file__)
        """)
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")])
    environment = {**os.environ, "PYTHONPATH": path}
    child = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=environment)
    assert child.stdout.split() == ["trains", "8", "True"], child.stderr


def test_a_script_without_a_guard_is_told_what_it_lacks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            from hotloop.data.loader import Loaders, LoaderSettings
            from test_loader import Numbers

            with Loaders([(Numbers(400), LoaderSettings(8))], 2) as (loader,):
                list(loader.batches())
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    child = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=environment)
    assert "WorkerError: a data worker ended with exit code 1 before it had taken its data" in child.stderr
    assert 'if __name__ == "__main__":' in child.stderr.splitlines()[-1]


def test_a_dropped_sample_is_read_once_and_nothing_in_its_place() -> None:
    class Counted(Numbers):
        def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
            asked.append(index)
            return super().sample(index, random)

    asked: list[int] = []
    dataset = Counted(200, damaged=tuple(range(1, 200)))
    with Loaders([(dataset, LoaderSettings(8, shuffle=False, on_damaged="drop"))], 0) as (loader,):
        asked.clear()
        assert sum(batch.size for batch in loader.batches()) == 1
    assert asked == list(range(200))


def test_a_replacement_of_another_shape_is_named_itself() -> None:
    replacement = read_sample(Numbers(40, damaged=(3,)), 5, 0, 3).index
    with pytest.raises(WorkerError, match=f"array of sample {replacement} has shape"):
        run(Numbers(40, damaged=(3,), ragged=replacement), 0, shuffle=False)


class Texts(Numbers):
    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        return {"text": np.array("a" * index)}


class Open(Numbers):
    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.file = Path(__file__).open()  # noqa: SIM115


def test_samples_of_texts_are_refused() -> None:
    with pytest.raises(InputError, match="text of sample 0 is of type <U"):
        run(Texts(20), workers=0)


def test_a_data_set_that_cannot_travel_is_refused_and_leaves_nothing_open() -> None:
    dataset = Open(20)
    with dataset.file:
        gc.collect()  # what earlier tests have left open is closed whenever it is collected
        before = os.listdir("/proc/self/fd")
        with pytest.raises(InputError, match="cannot travel"):
            run(dataset, workers=1)
        assert len(os.listdir("/proc/self/fd")) <= len(before)


class Shaped(Numbers):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__(8)
        self.shapes = shapes

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        return {name: np.zeros(shape) for name, shape in self.shapes.items()}


@pytest.mark.parametrize("dataset", [Shaped(x=(0, 3)), Shaped()], ids=["empty array", "no array"])
def test_samples_without_a_number_are_refused(dataset: Dataset) -> None:
    with pytest.raises(InputError, match="sample 0 holds no number"):
        run(dataset, workers=0)


def test_a_batch_holds_a_sample_at_least() -> None:
    with pytest.raises(InputError, match="batch_size is 0"):
        LoaderSettings(0)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(InputError, match="0 samples"):
        run(Numbers(0), workers=0)


def test_a_rings_slots_do_not_overlap() -> None:
    ring = Ring({"a": Field((3,), np.dtype(np.uint8)), "b": Field((), np.dtype(np.float64))}, batch_size=5, slots=3)
    for number in range(3):
        ring.slot(number)["a"][:] = number
        ring.slot(number)["b"][:] = number
    for number in range(3):
        assert (ring.slot(number)["a"] == number).all()
        assert (ring.slot(number)["b"] == number).all()
    ring.close()


def test_memory_that_the_machine_does_not_give_is_told_with_its_size() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # Python ignores the signal that comes of it
    try:
        with pytest.raises(InputError, match=r"4\.0 MiB of shared memory for 4 batches of 8 samples") as caught:
            Ring({"a": Field((131072,), np.dtype(np.uint8))}, batch_size=8, slots=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "batch_size" in caught.value.fix


class Unanswered(Numbers):
    """As files on a server that does not answer: all but the first batch."""

    def sample(self, index: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        if len(READ) == 8:
            threading.Event().wait()
        READ.append(index)
        return super().sample(index, random)


READ: list[int] = []


@pytest.mark.parametrize("dataset", ["Numbers", "Unanswered"])
def test_workers_end_when_the_training_process_is_killed(tmp_path: Path, dataset: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal
            from hotloop.data.loader import Loaders, LoaderSettings
            from test_loader import DATASET

            if __name__ == "__main__":
                with Loaders([(DATASET(400), LoaderSettings(8))], 2) as (loader,):
                    next(loader.batches())
                    print(*(worker.process.pid for worker in loader._pool._workers), flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
        """).replace("DATASET", dataset)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    child = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=environment)
    pids = [int(pid) for pid in child.stdout.split()]
    assert len(pids) == 2
    # The workers hold the child's standard output: `run` returned because both had closed it.
    assert not any(_is_python(pid) for pid in pids)


def _is_python(pid: int) -> bool:
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_worker_counts_suit_the_machine() -> None:
    assert [workers_for(cpus, accelerated=True) for cpus in (1, 2, 16, 64)] == [1, 1, 14, 16]
    assert workers_for(16, accelerated=False) == 1
