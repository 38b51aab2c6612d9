"""The search for settings, over trainings of which it is known how long they take."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("optuna", reason="pip install 'hotloop[tune]'")

from hotloop.core.errors import HotloopError
from hotloop.core.tuning import Settings, Trial, Tuning
from hotloop.tune.running import Chunk, Failed, mean_of
from hotloop.tune.search import Effort, Search
from hotloop.tune.space import Knob, start_of

EFFORT = Effort(budget_seconds=1e6)


class Pretended:
    """A training whose chunks take what a function of the settings says, and some chance."""

    def __init__(self, chunks: Callable[[], Iterator[Chunk]]) -> None:
        self._chunks = chunks

    def chunks(self, deadline: float) -> Iterator[Chunk]:
        return self._chunks()


def search(
    space: tuple[Knob, ...], seconds: Callable[[Settings], float], noise: float = 0.0, effort: Effort = EFFORT,
    loss: Callable[[Settings, int], float] = lambda settings, step: 1.0, told: Any = lambda trial: None,
) -> Tuning:  # fmt: skip
    chance = random.Random(0)

    @contextmanager
    def start(settings: Settings) -> Iterator[Any]:
        def chunks() -> Iterator[Chunk]:
            yield Chunk(9.0, losses=((1, loss(settings, 0)),))  # the first ones compile
            for step in range(1, 30):
                yield Chunk(seconds(settings) * chance.gauss(1, noise), losses=((1, loss(settings, step)),))

        yield Pretended(chunks)

    return Search(space, start, effort, told).run(("job.toml",))


FACTORS = st.lists(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=4), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(FACTORS)
def test_what_settings_bring_each_by_itself_is_found_at_a_part_of_the_grids_cost(factors: list[list[float]]) -> None:
    space = tuple(Knob(f"k{n}", tuple(range(len(values)))) for n, values in enumerate(factors))

    def seconds(chosen: Settings) -> float:
        product = 1.0
        for knob, values in zip(space, factors, strict=True):
            product *= values[int(chosen[knob.name])]
        return product

    found = search(space, seconds)
    best = 1.0
    for values in factors:
        best *= min(values)
    assert seconds(found.best) <= best * 1.01 ** len(space) * 1.001
    tried = {tuple(sorted(trial.settings.items())) for trial in found.trials}
    assert len(tried) <= sum(map(len, factors)) + 4
    assert found.before == pytest.approx(seconds(start_of(space)))


@pytest.mark.parametrize(("best", "tried"), [(1, [2, 4, 1, 0]), (2, [2, 4, 1]), (4, [2, 4, 8])])
def test_numbers_are_followed_up_or_down_until_they_are_slower(best: int, tried: list[int]) -> None:
    space = (Knob("workers", (2, 0, 1, 4, 8), rises=True, counts=True),)
    found = search(space, lambda one: 1.0 + abs(int(one["workers"]) - best))
    assert found.best["workers"] == best
    assert [trial.settings["workers"] for trial in found.trials][: len(tried)] == tried, "then others are proposed"


@pytest.mark.parametrize(
    ("seconds", "tried"),
    [
        ([1.0, 1.5, 1.7, 2.0, 2.5], [0, 1, 2]),
        ([1.0, 1.5, 1.6, 0.8, 0.9], [0, 1, 2, 4, 8]),
        ([1.0, 0.9, 0.95, 9.0, 9.0], [0, 1, 2]),
    ],
)
def test_numbers_that_only_get_slower_are_not_all_tried(seconds: list[float], tried: list[int]) -> None:
    """Of a script it is not known which number it has itself."""
    space = (Knob("workers", (0, 1, 2, 4, 8), rises=True),)
    times = dict(zip((0, 1, 2, 4, 8), seconds, strict=True))
    found = search(space, lambda one: times[int(one["workers"])])
    assert [trial.settings["workers"] for trial in found.trials][: len(tried)] == tried, "then others are proposed"
    assert len({trial.settings["workers"] for trial in found.trials}) <= len(tried) + 1


def test_what_two_settings_bring_together_only_is_found_where_one_of_them_brings_something() -> None:
    space = (Knob("a", (0, 1)), Knob("b", (0, 1, 2)))
    times = {(0, 0): 1.0, (1, 0): 0.9, (0, 2): 1.2, (1, 2): 0.5}
    found = search(space, lambda one: times.get((int(one["a"]), int(one["b"])), 1.1), noise=0.02)
    assert dict(found.best) == {"a": 1, "b": 2}
    assert found.certain
    assert found.ratio == pytest.approx(2.0, rel=0.05)


def test_what_needs_another_setting_is_tried_once_that_is_chosen() -> None:
    """As float8 does, which is slower where nothing is compiled."""
    space = (
        Knob("precision", ("fp32", "bf16", "float8"), needs="compile", needing=("float8",)),
        Knob("compile", (False, True)),
    )

    def seconds(chosen: Settings) -> float:
        compute = {"fp32": 1.0, "bf16": 0.5, "float8": 0.35}[str(chosen["precision"])]
        return compute * 0.8 if chosen["compile"] else {0.35: 3.0}.get(compute, compute)

    found = search(space, seconds)
    assert dict(found.best) == {"precision": "float8", "compile": True}
    assert {"precision": "float8", "compile": False} not in [dict(trial.settings) for trial in found.trials]


@pytest.mark.parametrize("now", ["fp32", "float8"])
def test_what_lost_by_far_before_another_setting_was_chosen_is_tried_again(now: str) -> None:
    others = [one for one in ("fp32", "bf16", "float8") if one != now]
    space = (Knob("precision", (now, *others), needs="compile", needing=("float8",)), Knob("compile", (False, True)))
    eager = {"fp32": 1.0, "bf16": 1.15, "float8": 3.0}
    compiled = {"fp32": 0.8, "bf16": 0.5, "float8": 0.6 if now == "fp32" else 0.35}

    def seconds(chosen: Settings) -> float:
        return (compiled if chosen["compile"] else eager)[str(chosen["precision"])]

    best = "bf16" if now == "fp32" else "float8"
    assert dict(search(space, seconds).best) == {"precision": best, "compile": True}


def test_what_a_bottleneck_hides_is_found_once_that_is_gone() -> None:
    hidden = tuple(Knob(name, (0, 1)) for name in ("layout", "kernels", "threads", "memory"))
    space = (*hidden, Knob("workers", (0, 1, 2, 4), rises=True, counts=True))

    def seconds(chosen: Settings) -> float:
        load = {0: 1.0, 1: 0.8, 2: 0.1, 4: 0.15}[int(chosen["workers"])]
        compute = 0.7
        for knob in hidden:
            compute *= 0.85 if chosen[knob.name] else 1.0
        return max(load, compute)

    assert seconds(search(space, seconds, noise=0.02).best) == pytest.approx(0.7 * 0.85**4)


@pytest.mark.parametrize("noise", [0.02, 0.06, 0.1])
def test_noise_alone_changes_nothing(noise: float) -> None:
    space = tuple(Knob(f"k{n}", (False, True)) for n in range(4))
    found = search(space, lambda one: 1.0, noise=noise)
    assert not any(found.best.values())


def test_losers_end_early_and_numbers_that_rise_in_vain_are_not_tried() -> None:
    trials: list[Trial] = []
    space = (Knob("workers", (1, 2, 4, 8, 16, 32), rises=True, counts=True),)
    times = {1: 1.0, 2: 0.6, 4: 0.5, 8: 0.7}
    found = search(space, lambda one: times.get(int(one["workers"]), 5.0), told=trials.append)
    assert dict(found.best) == {"workers": 4}
    first = [int(trial.settings["workers"]) for trial in trials[:4]]
    assert first == [1, 2, 4, 8]
    assert trials[3].state == "worse"


def test_a_word_for_what_there_is_is_no_number_below_the_others() -> None:
    """A script with eight workers of its own: fewer are slower, more are faster."""
    times = {0: 1.0, 1: 5.0, 4: 2.0, 8: 1.0, 16: 0.6}
    space = (Knob("workers", (0, 1, 4, 8, 16), rises=True), Knob("factor", (0, 4), needs="workers", needing=(4,)))
    found = search(space, lambda one: times[int(one["workers"])])
    assert dict(found.best) == {"workers": 16, "factor": 0}


def test_a_first_trial_that_was_cold_is_repeated() -> None:
    """Files that come from the disk at first, and from memory from then on."""
    started: list[Settings] = []

    def seconds(one: Settings) -> float:
        if not started or started[-1] is not one:
            started.append(one)
        return 2.0 if len(started) == 1 else 1.0

    found = search((Knob("a", (0, 1)), Knob("b", (0, 1))), seconds)
    assert len([trial for trial in found.trials if not any(trial.settings.values())]) > 1
    assert found.ratio < 1.6


def test_a_setting_whose_loss_drifts_or_that_fails_is_not_taken() -> None:
    def seconds(one: Settings) -> float:
        if one["broken"]:
            raise Failed("CUDA out of memory")
        return 0.5 if one["wrong"] else 1.0

    def loss(one: Settings, step: int) -> float:
        return 3.0 - step / 30 if one["wrong"] else 1.0 - step / 60

    trials: list[Trial] = []
    space = (Knob("broken", (False, True)), Knob("wrong", (False, True)))
    found = search(space, seconds, loss=loss, told=trials.append)
    assert dict(found.best) == {"broken": False, "wrong": False}
    why = {trial.why for trial in trials if trial.state == "failed"}
    assert any("CUDA out of memory" in one for one in why)
    assert any(one.startswith("its loss over") for one in why)


def test_a_training_that_does_not_run_is_said_to_be_so() -> None:
    def seconds(one: Settings) -> float:
        raise Failed("no such file")

    with pytest.raises(HotloopError, match="does not run with its present settings"):
        search((Knob("a", (0, 1)),), seconds)


def test_ctrl_c_keeps_the_best_so_far() -> None:
    def seconds(one: Settings) -> float:
        if one["b"]:
            raise KeyboardInterrupt
        return 0.5 if one["a"] else 1.0

    found = search((Knob("a", (0, 1)), Knob("b", (0, 1))), seconds)
    assert (dict(found.best), found.ended) == ({"a": 1, "b": 0}, "interrupted")


def test_ctrl_c_before_anything_was_measured_is_ctrl_c() -> None:
    def seconds(one: Settings) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search((Knob("a", (0, 1)),), seconds)


def test_the_budget_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("hotloop.tune.search.time.monotonic", lambda: now[0])

    def seconds(one: Mapping[str, Any]) -> float:
        now[0] += 1.0
        return 1.0

    found = search((Knob("a", tuple(range(50))),), seconds, effort=Effort(budget_seconds=60))
    assert found.ended == "budget"
    assert 1 < len(found.trials) < 50


def test_a_mean_is_of_samples_where_an_epochs_end_waits_for_steps_in_flight() -> None:
    chunks = [Chunk(0.047, 10), Chunk(0.0248, 30)] * 10
    mean, error = mean_of(chunks)
    assert mean == pytest.approx((0.47 + 0.744) / 40)
    assert error < 0.1 * mean
    assert mean_of([*chunks, Chunk(9.0, 1)])[0] == pytest.approx(mean), "what was compiled counts for nothing"
    assert mean_of([Chunk(2.0), Chunk(2.0), Chunk(2.0)]) == pytest.approx((2.0, 0.0))
