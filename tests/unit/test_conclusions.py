"""What is concluded from measurements: shares, verdict, findings, comparison."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.accelerate.plan import EXACT, chosen
from hotloop.core.errors import InputError
from hotloop.core.profile import KINDS, Ablation, Profile, RankProfile, StepSeconds
from hotloop.pages.profile import render_profile
from hotloop.profile.compare import compare, is_met
from hotloop.profile.conclude import conclude, read_measured
from hotloop.profile.findings import Evidence, findings
from hotloop.profile.measured import Block, LoaderFacts, Measured, StepTime
from hotloop.profile.shares import ablations, overhead_ratio, shares, slow_rank, verdict
from hotloop.profile.timeline import Timeline

FACTS = {"torch": "2.11.0", "threads": 4, "processors": 16, "tf32": True, "cudnn_benchmark": False}
LOADER = LoaderFacts("train.py:9", workers=4, batch_size=64, workers_busy=0.98)


def block(name: str, seconds: float, number: int = 20, input: float = 0.0, **given: float) -> Block:
    return Block(name, (StepTime(seconds, input, **given),) * number)  # type: ignore[arg-type]


def measured(*blocks: Block, **given: object) -> Measured:
    made = Measured(device_name="a card", steps_seen=99, complete=True, blocks=blocks, loader=LOADER, facts=FACTS)
    return replace(made, **given)  # type: ignore[arg-type]


def line(added: float = 0.0, **seconds: float) -> Timeline:
    """One traced step in which so much of each kind was found, and which tracing made so much longer."""
    times, at = {}, 0.0
    for kind, length in seconds.items():
        times[kind] = [(at, at + length)]
        at += length
    return Timeline(1, (0.0, at), times, (), added=added)


def test_on_a_cpu_the_watched_steps_say_what_input_took_and_the_trace_the_rest() -> None:
    found = shares(measured(block("watched", 1.0, input=0.4)), line(input=9.0, compute=2.0, other=1.0))
    assert found == pytest.approx({**dict.fromkeys(KINDS, 0.0), "input": 0.4, "compute": 0.4, "other": 0.2})


def test_on_a_gpu_a_profiler_stretches_the_rests_and_not_the_work() -> None:
    watched = replace(block("watched", 9.0, input=0.5), device_seconds=(1.0,) * 20)
    traced = line(compute=0.4, sync=0.1, launch=1.0, input=0.5)
    found = shares(measured(watched, device="cuda"), traced)
    told = [found[kind] for kind in ("compute", "sync", "launch", "input")]
    assert told == pytest.approx([0.4, 0.1, 1 / 3, 1 / 6])


@pytest.mark.parametrize(
    ("traced", "expected"),
    [
        ({"compute": 0.4, "copy": 0.5, "launch": 0.7}, {"compute": 0.4, "copy": 0.5, "launch": 0.1}),
        ({"compute": 0.1, "other": 0.3, "launch": 1.2}, {"compute": 0.1, "other": 0.3, "launch": 0.6}),
        ({"compute": 0.1, "launch": 1.5}, {"compute": 0.1, "launch": 0.9}),  # as launch-bound as without a trace
        ({"compute": 0.4, "copy": 0.9, "launch": 0.3}, {"compute": 0.4, "copy": 0.6}),
        # A loader that was late in the steps that were traced, by all but 0.1 s of what these took longer.
        ({"compute": 0.2, "input": 1.1, "launch": 0.3}, {"compute": 0.2, "input": 0.6, "launch": 0.2}),
    ],
)
def test_what_tracing_adds_to_launches_is_none_of_the_scripts(
    traced: dict[str, float], expected: dict[str, float]
) -> None:
    """A step of 1 s that took 1.6 s with a trace."""
    found = shares(measured(block("watched", 1.0, input=0.6), device="cuda"), line(added=0.6, **traced))
    assert found == pytest.approx({**dict.fromkeys(KINDS, 0.0), **expected})
    assert verdict(found, ()) == max(expected, key=lambda kind: expected[kind])


@given(
    st.dictionaries(st.sampled_from(KINDS), st.floats(0, 10), min_size=1),
    st.floats(0.001, 5), st.floats(0, 1), st.sampled_from(["cpu", "cuda"]), st.floats(0, 10),
)  # fmt: skip
def test_shares_add_up_to_one(
    traced: dict[str, float], seconds: float, input: float, device: str, added: float
) -> None:
    given_by = measured(block("watched", seconds, input=input * seconds), device=device)
    found = shares(given_by, line(added, **traced))
    assert sum(found.values()) == pytest.approx(1)
    assert min(found.values()) >= -1e-9
    assert tuple(found) == KINDS


@pytest.mark.parametrize(
    ("found", "gains", "expected"),
    [
        ({"compute": 0.9, "other": 0.1}, {}, "compute"),
        ({"compute": 0.5, "input": 0.3, "launch": 0.2}, {}, "input"),
        ({"compute": 0.7, "input": 0.05, "other": 0.25}, {"cached_batch": 0.6}, "input"),
        ({"compute": 0.2, "launch": 0.5, "sync": 0.3}, {"no_sync": 0.6}, "sync"),
        ({"compute": 0.05, "communication": 0.95}, {}, "communication"),
        ({"compute": 0.2, "input": 0.2, "copy": 0.15, "launch": 0.15, "other": 0.3}, {}, "other"),
    ],
)
def test_the_verdict_is_what_costs_most(found: dict[str, float], gains: dict[str, float], expected: str) -> None:
    left_out = [Ablation(name, 1 - gain, gain) for name, gain in gains.items()]
    assert verdict({**dict.fromkeys(KINDS, 0.0), **found}, left_out) == expected


def test_steps_that_were_disturbed_prove_nothing() -> None:
    """Two of seven whole steps took 25 times as long as the others, which took as long as those without loading."""
    watched = Block("watched", tuple(StepTime(seconds) for seconds in (0.1, 2.5, 0.1, 0.1, 2.5, 0.1, 0.1)))
    cached = Block("cached_batch", tuple(StepTime(seconds) for seconds in (0.09, 0.1, 0.11)))
    left_out = ablations(measured(watched, cached, loader=LOADER), 0.7)
    assert left_out[0].gain > 0.8
    assert not left_out[0].is_certain
    found = {**dict.fromkeys(KINDS, 0.0), "input": 0.01, "compute": 0.79, "other": 0.2}
    assert verdict(found, left_out) == "compute"


def evidence(made: Measured, gains: dict[str, float] | None = None, **found: float) -> Evidence:
    left_out = tuple(Ablation(name, 1 - gain, gain) for name, gain in (gains or {}).items())
    return Evidence(made, {**dict.fromkeys(KINDS, 0.0), **found}, left_out)


@pytest.mark.parametrize(
    ("loader", "cause"),
    [
        (replace(LOADER, workers=0, workers_busy=0.9), "input.no_workers"),
        (replace(LOADER, workers=4, workers_busy=0.95), "input.few_workers"),
        (replace(LOADER, workers=16, workers_busy=0.95), "input.slow_transform"),
        (replace(LOADER, workers=16, workers_busy=0.0), "input.slow_storage"),
    ],
)
def test_slow_input_has_a_cause_that_was_measured(loader: LoaderFacts, cause: str) -> None:
    found = findings(evidence(measured(block("watched", 1.0), loader=loader), {"cached_batch": 0.7}, input=0.5))
    assert [(one.id, one.gain_at_most, one.location) for one in found] == [(cause, 0.7, "train.py:9")]


@pytest.mark.parametrize(
    ("device", "workers", "busy", "gain", "fix", "expected"),
    [
        ("cuda", 1, 0.1, 0.79, "num_workers=5,", 0.79),
        ("cuda", 1, 0.1, 0.99, "num_workers=16,", 1 - 1 / 16),  # what 16 wait for at once, and no less
        ("cuda", 4, 0.1, 0.99, "num_workers=16,", 1 - 4 / 16),
        ("cuda", 16, 0.1, 0.8, "a faster disk", 0.8),
        ("cpu", 1, 0.16, 0.79, "num_workers=5,", 0.79 - 0.16 / FACTS["processors"]),  # the training's own processors
        ("cpu", 16, 0.5, 0.8, "a faster disk", 0.8 - 16 * 0.5 / FACTS["processors"]),
        ("cpu", 16, 0.6, 0.1, "", 0.0),
    ],
)
def test_more_workers_gain_what_their_waiting_at_once_leaves(
    device: str, workers: int, busy: float, gain: float, fix: str, expected: float
) -> None:
    made = measured(block("watched", 1.0), device=device, loader=replace(LOADER, workers=workers, workers_busy=busy))
    found = findings(evidence(made, {"cached_batch": gain}, input=0.5))
    assert [one.gain_at_most for one in found] == ([pytest.approx(expected)] if expected else [])
    assert all(fix in one.fix for one in found)


def test_where_other_programs_take_the_processors_nothing_is_said_to_wait_for_a_disk() -> None:
    """Its workers rest, and the thread that trains waits for a processor inside of the loader, too."""
    resting = replace(LOADER, workers_busy=0.05)
    for late, said in ((0.85, False), (0.03, True)):
        watched = replace(block("watched", 1.0, input=0.5), late=late)
        made = measured(watched, block("cached_batch", 0.3), loader=resting)
        left_out = ablations(made, 0.5)
        assert left_out[0].is_certain == said
        assert [one.id for one in findings(evidence(made, {"cached_batch": 0.7}, input=0.5))] == (
            ["input.slow_storage"] if said else []
        )


def test_workers_that_rest_are_no_finding_and_workers_that_crowd_the_training_are() -> None:
    resting, crowding = (replace(LOADER, workers_busy=busy) for busy in (0.06, 0.95))
    found = [
        findings(evidence(measured(block("watched", 1.0), loader=one), {"cached_batch": 0.2}, input=0.02))
        for one in (resting, crowding)
    ]
    assert [[one.id for one in each] for each in found] == [[], ["input.few_workers"]]


def test_nothing_is_said_of_what_costs_nothing() -> None:
    made = measured(block("watched", 1.0), sync_lines={"train.py:3 item": 0.5})
    assert findings(evidence(made, {"cached_batch": 0.001, "no_sync": -0.02}, compute=0.99, other=0.01)) == ()


@pytest.mark.parametrize(
    ("waits", "seen", "gain"),
    [(1, 80, 0.55), (512, 80, 0.8), (512, 40, 0.55), (512, 99, 0.95)],
)
def test_a_line_that_waits_again_and_again_can_be_saved_as_a_whole(waits: int, seen: int, gain: float) -> None:
    """Reading all at once saves the loop too; but the GPU's own work remains."""
    watched = replace(block("watched", 1.0), lines={"train.py:3": seen, "train.py:4": 1}, looks=100)
    made = measured(watched, device="cuda", sync_lines={"train.py:3 item": 0.5}, waits=float(waits))
    found = findings(evidence(made, {"no_sync": 0.55}, sync=0.95, compute=0.05))
    assert [(one.id, one.gain_at_most) for one in found] == [("sync", pytest.approx(gain))]
    assert ("a step waits 512 times" in found[0].evidence) == (waits > 1)


@pytest.mark.parametrize(("loading", "gain"), [(0.0, 0.95), (0.6, 0.35)])
def test_of_a_line_that_waits_what_loading_takes_is_not_saved(loading: float, gain: float) -> None:
    """Steps without waits have their batches given again: 0.4 s, of which the line takes seven in eight."""
    watched = replace(block("watched", 1.0), lines={"train.py:3": 10}, looks=100)
    alone = replace(block("no_sync", 0.4), lines={"train.py:3": 70}, looks=80)
    made = measured(watched, alone, device="cuda", sync_lines={"train.py:3 item": 0.1}, waits=10.0, loader=None)
    gains = {"cached_batch": loading, "no_sync": loading} if loading else {"no_sync": 0.6}
    found = findings(evidence(made, gains, sync=0.95))
    assert [(one.id, one.gain_at_most) for one in found] == [("sync", pytest.approx(gain))]


@pytest.mark.parametrize(
    ("device", "other", "in_models", "gain"),
    [("cuda", 0.8, 0, 0.95), ("cuda", 0.8, 90, 0.8), ("cuda", 0.4, 0, 0.4), ("cpu", 0.8, 0, 0.8)],
)
def test_what_a_scripts_own_python_takes_is_seen_without_a_trace(
    device: str, other: float, in_models: int, gain: float
) -> None:
    """Which lengthens launches, and so makes less of it; but only where it is what holds the training up."""
    watched = replace(block("watched", 1.0), lines={"train.py:4": 95}, looks=100, in_models=in_models)
    made = measured(watched, device=device)
    found = findings(evidence(made, other=other, launch=0.95 - other, compute=0.05))
    assert [one.gain_at_most for one in found if one.id == "other.python"] == [pytest.approx(gain)]


@pytest.mark.parametrize(("busy", "others"), [(0.9, "the DataLoader's workers"), (0.1, "something else")])
def test_who_takes_the_processors_is_told(busy: float, others: str) -> None:
    watched, loader = replace(block("watched", 1.0), queued=0.5), replace(LOADER, workers_busy=busy)
    found = conclude([measured(watched, loader=loader)], Path(), ["python", "train.py"])[0]
    assert any(f"50% of the time: used by {others}" in note for note in found.notes)


@pytest.mark.parametrize(("error", "found"), [(0.02, True), (0.3, False)])
def test_page_faults_are_named_where_keeping_memory_is_proven_to_help(error: float, found: bool) -> None:
    made = measured(block("watched", 1.0), memory={"num_page_faults_a_step": 6000.0})
    told = findings(
        Evidence(made, {**dict.fromkeys(KINDS, 0.0), "compute": 1.0}, (Ablation("kept_memory", 0.6, 0.4, error),))
    )
    assert [(one.id, one.gain_at_most) for one in told] == ([("memory.page_faults", 0.4)] if found else [])


@pytest.mark.parametrize(
    ("name", "cause", "outside"),
    [("bfloat16", "compute.float32", "bf16"), ("first_gpu_alone", "data_parallel", "")],
)
@pytest.mark.parametrize(("error", "found"), [(0.02, True), (0.3, False)])
def test_of_how_a_model_computes_is_said_what_was_timed_otherwise(
    name: str, cause: str, outside: str, error: float, found: bool
) -> None:
    made = measured(block("watched", 1.0), device="cuda")
    shares_found = {**dict.fromkeys(KINDS, 0.0), "compute": 1.0}
    told = findings(Evidence(made, shares_found, (Ablation(name, 0.6, 0.4, error),)))
    assert [(one.id, one.gain_at_most, one.outside) for one in told] == ([(cause, 0.4, outside)] if found else [])


@pytest.mark.parametrize(("used", "said"), [(5e9, True), (90e9, False)])
def test_larger_batches_are_advised_where_there_is_room_for_them(used: float, said: bool) -> None:
    made = measured(block("watched", 1.0), device="cuda", memory={"peak_bytes": used, "total_bytes": 140e9})
    (found,) = findings(evidence(made, launch=0.8, compute=0.2))
    assert ("larger batches" in found.fix) == ("are in use" in found.evidence) == said


def test_workers_that_a_run_cannot_replace_are_not_said_to_be_replaced() -> None:
    slow = measured(block("watched", 1.0, input=0.8), loader=replace(LOADER, can_be_replaced=False))
    found = findings(Evidence(slow, dict.fromkeys(KINDS, 0.0) | {"input": 0.8}, ()))
    assert [(one.id, one.outside) for one in found] == [("input.few_workers", "")]


def test_of_several_trainings_in_one_command_it_is_said_that_there_were(tmp_path: Path) -> None:
    for name, steps in (("first", 20), ("second", 30)):
        folder = tmp_path / name
        folder.mkdir()
        measured(block("watched", 1.0, steps), steps_seen=steps).save(folder)
        next(folder.glob("measured-*.json")).rename(tmp_path / f"measured-{steps}.json")
    (found,) = read_measured(tmp_path)
    assert (found.steps_seen, "2 processes trained" in found.unseen[-1]) == (30, True)


def test_what_a_run_does_from_outside_are_accelerations_that_there_are() -> None:
    loaders = [replace(LOADER, workers=n, workers_busy=b) for n, b in ((0, 0.9), (16, 0.0), (16, 0.95))]
    loaders.append(replace(loaders[2], dataset="ImageFolder"))
    found = [findings(evidence(measured(block("watched", 1.0), loader=one), input=0.5))[0] for one in loaders]
    assert [one.outside for one in found] == ["loader", "loader", "", "image_folder"]
    for one in found:
        assert not one.outside or chosen(EXACT, [one.outside])


def test_what_clearing_the_cache_takes_is_not_the_scripts_own_python() -> None:
    watched = replace(block("watched", 1.0), lines={"train.py:4": 90}, looks=100)
    memory = {"num_device_alloc_a_step": 3.0, "num_device_free_a_step": 3.0, "num_empty_caches_a_step": 1.0}
    made = measured(watched, device="cuda", memory=memory)
    found = findings(evidence(made, {"no_empty_cache": 0.75}, other=0.85, compute=0.1))
    assert [(one.id, one.gain_at_most) for one in found] == [
        ("memory.thrash", 0.75), ("other.python", pytest.approx(0.15)),
    ]  # fmt: skip


def test_what_a_compiled_model_saves_is_its_own_python_too() -> None:
    watched = replace(block("watched", 1.0), lines={"model.py:3": 30, "train.py:4": 10}, looks=100, in_models=30)
    found = findings(evidence(measured(watched, device="cuda"), launch=0.7, other=0.2, compute=0.1))
    assert [(one.id, one.gain_at_most) for one in found] == [
        ("launch", pytest.approx(0.7 + 0.75 * 0.2)), ("other.python", pytest.approx(0.2)),
    ]  # fmt: skip
    on_cpu = findings(evidence(measured(watched), other=0.2, compute=0.8))
    assert [one.id for one in on_cpu] == ["other.python"]


def test_what_gains_most_comes_first() -> None:
    made = measured(
        block("watched", 1.0, compiling=0.3),
        device="cuda",
        sync_lines={"a.py:3 item": 0.1, "a.py:7 cpu": 0.5},
        memory={"num_device_alloc_a_step": 3.0, "num_device_free_a_step": 3.0, "num_empty_caches_a_step": 1.0},
        facts={**FACTS, "threads": 64},
    )
    gains = {"cached_batch": 0.04, "batch_on_device": 0.1, "no_sync": 0.2, "fewer_threads": 0.15}
    found = findings(evidence(made, gains, compute=0.4, sync=0.1, launch=0.28, copy=0.08, other=0.14))
    assert [one.id for one in found] == [
        "memory.thrash", "recompiles", "launch", "sync", "threads.oversubscribed", "copy", "input.few_workers",
    ]  # fmt: skip
    by_id = {one.id: one for one in found}
    assert by_id["sync"].location == "a.py:7"
    assert by_id["copy"].gain_at_most == pytest.approx(0.06)
    assert "64 threads" in by_id["threads.oversubscribed"].evidence
    assert by_id["memory.thrash"].fix == "take empty_cache() out"


def rank(number: int, communication: float, least: float = 0.05, **found: float) -> RankProfile:
    seconds = StepSeconds(1.0, 1.0, 1.0, 1.0, 0.0)
    given = {**dict.fromkeys(KINDS, 0.0), **found, "communication": communication}
    return RankProfile(number, seconds, given, round(communication - least, 9))


def test_a_slow_rank_is_the_one_that_waits_least() -> None:
    ranks = [rank(0, 0.6, compute=0.4), rank(1, 0.05, other=0.55, compute=0.4), rank(2, 0.5, compute=0.4)]
    slow = slow_rank(ranks)
    assert slow is ranks[1]
    found = findings(replace(evidence(measured(block("watched", 1.0))), ranks=tuple(ranks)))
    assert [(one.id, round(one.gain_at_most, 2)) for one in found] == [("slow_rank", 0.5), ("communication", 0.05)]
    assert "55% of its own on other" in found[0].evidence
    assert slow_rank([rank(0, 0.6, least=0.58), rank(1, 0.58, least=0.58)]) is None


def test_overhead_is_watched_over_bare() -> None:
    assert overhead_ratio(measured(block("watched", 1.02), block("bare", 1.0))) == pytest.approx(0.02)
    assert overhead_ratio(replace(measured(block("watched", 1.02)), hooks_ratio=0.01)) == 0.01


def test_overhead_is_what_our_code_took_where_steps_are_too_uneven_to_tell() -> None:
    uneven = Block("bare", tuple(StepTime(seconds) for seconds in (0.5, 1.5) * 10))
    assert overhead_ratio(replace(measured(block("watched", 1.2), uneven), hooks_ratio=0.01)) == 0.01


def a_profile(seconds: float, input: float) -> Profile:
    made = measured(block("watched", seconds, input=input), block("cached_batch", seconds - input))
    return conclude([made], Path(), ["python", "train.py"])[0]


def test_a_profile_is_read_back_as_it_was(tmp_path: Path) -> None:
    made = a_profile(1.0, 0.4)
    (tmp_path / "p.json").write_text(made.to_json())
    assert Profile.load(tmp_path / "p.json") == made
    assert made.verdict == "input"
    assert made.sentence.startswith(
        "input-bound: 40% of each step of 1.0 s waits for data; without it a step took 600 ms"
    )


def test_measurements_travel_whole(tmp_path: Path) -> None:
    made = measured(block("watched", 1.0, input=0.3), sync_lines={"a.py:1 item": 0.5}, unseen=("a note",))
    made.save(tmp_path)
    (file,) = tmp_path.iterdir()
    assert Measured.load(file) == made


def test_the_page_escapes_what_a_script_is_called() -> None:
    page = render_profile(replace(a_profile(1.0, 0.4), command=("python", "<b>.py")), {}, (0.0, 0.0))
    assert "&lt;b&gt;.py" in page
    assert "<b>.py" not in page


def test_changes_are_named_and_conditions_hold_or_not() -> None:
    changes = compare(a_profile(1.0, 0.4), a_profile(0.8, 0.2))
    by_name = {change.name: change for change in changes}
    assert by_name["step_seconds"].ratio == pytest.approx(0.8)
    assert (by_name["input_seconds"].before, by_name["input_seconds"].after) == pytest.approx((0.4, 0.2))
    met = ["step_seconds < 0.81x", "step_seconds<=0.9", "shares.input >= 20%", "shares.input > 0.2x"]
    unmet = ["step_seconds > 1.05x", "shares.input > 0.3", "compute_seconds > 1.01x"]
    assert [is_met(condition, changes) for condition in met] == [True] * 4
    assert [is_met(condition, changes) for condition in unmet] == [False] * 3


@pytest.mark.parametrize(
    "condition",
    [
        "",
        "step_seconds",
        "speed > 2x",
        "step_seconds > 1..5",
        "step_seconds > 1e400",
        "step_seconds == 2",
        "step_seconds > 105%",
    ],
)
def test_a_condition_that_makes_no_sense_is_an_error(condition: str) -> None:
    with pytest.raises(InputError, match="--fail-if"):
        is_met(condition, compare(a_profile(1.0, 0.4), a_profile(1.0, 0.4)))
