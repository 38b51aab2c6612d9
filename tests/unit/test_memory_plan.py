"""A rank's memory and a step's seconds, from a footprint of known figures."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.plan.cards import card_named
from hotloop.plan.footprint import Cost, Footprint, Moment, State, scaled, summed
from hotloop.plan.memory import Division, Memory, least_bytes, memory_of
from hotloop.plan.seconds import StepTime, exchanged_bytes, layers_bytes, step_time
from hotloop.tasks.cross_entropy import CHUNK_BYTES
from hotloop.train.gathered import ROOM

GB = 1e9
STATE = State(
    parameters=1_000_000_000,
    parameter_bytes=4 * GB,
    buffer_bytes=0.0,
    saved_buffer_bytes=0.0,
    optimizer_bytes=8 * GB,
    learnt_bytes=4 * GB,
    block_bytes=0.1 * GB,
    blocks=10,
    blocks_share=1.0,
    update=Moment(0.0, 0.0, 0.5 * GB),
    update_costs=(Cost("memory", "fp32", 0.0, 28 * GB, 1),),
)
PRODUCT = Cost("matrix", "bf16", 1e12, 1e8, 100)
FOOTPRINT = Footprint(STATE, 8, 1e6, 1e7, (Moment(20 * GB, 0.0, 1 * GB), Moment(1 * GB, 4 * GB, 1 * GB)), (PRODUCT,))


def memory(
    division: Division, averaged: bool = False, accumulates: bool = False, total_bytes: float = 0.0,
    footprint: Footprint = FOOTPRINT,
) -> Memory:  # fmt: skip
    return memory_of(footprint, division, averaged, accumulates, total_bytes)


def seconds(card: str = "H100", division: Division | None = None, footprint: Footprint = FOOTPRINT) -> StepTime:
    return step_time(footprint, card_named(card), "bf16", division or Division(), 1, True, False)


def test_what_fsdp_divides_is_whole_with_ddp() -> None:
    whole, divided = memory(Division(4)).parts, memory(Division(4, weights=True)).parts
    for part in ("weights", "optimizer"):
        assert divided[part] == pytest.approx(whole[part] / 4)
    assert divided["activations"] == whole["activations"]
    assert whole["communication"] == 4 * GB, "gradients once more, where ways to average them are tried"
    assert 0 < divided["communication"] < whole["communication"]
    assert memory(Division()).parts["communication"] == 0


@pytest.mark.parametrize(("room", "kept"), [(0.99, 0.0), (1.01, 1.9 * GB)])
def test_where_there_is_room_blocks_keep_their_weights(room: float, kept: float) -> None:
    """In 16 bits; of two blocks they are there anyway."""
    before = memory(Division(4, weights=True))
    after = memory(Division(4, weights=True), total_bytes=room * (before.peak + 1.9 * GB) / ROOM)
    assert after.allocated - before.allocated == pytest.approx(kept, abs=1)
    assert memory(Division(4), total_bytes=1e15) == memory(Division(4))


@settings(max_examples=30)
@given(done=st.floats(0, 1), blocks=st.floats(0.3, 1))
def test_weights_that_blocks_keep_go_as_their_gradients_come(done: float, blocks: float) -> None:
    late = replace(FOOTPRINT, passes=(Moment(20 * GB, 4 * GB * done, 0.0), Moment(0.0, 4 * GB, 0.0)))
    late = replace(late, state=replace(STATE, blocks_share=blocks))
    base, kept = (memory(Division(4, weights=True), total_bytes=total, footprint=late) for total in (0.0, 1e15))
    more = max(0.0, min(1 - done, blocks) * 2 * GB - 0.1 * GB)
    assert kept.allocated - base.allocated == pytest.approx(more, abs=1e6)


def test_ranks_that_compute_layers_together_gather_their_part_of_blocks() -> None:
    half = replace(FOOTPRINT, state=replace(STATE, blocks_share=0.5))
    for total, gathered in ((0.0, 2 * 0.1), (1e15, 0.5 * 4)):  # two blocks, or all that are kept
        parts = memory(Division(8, weights=True, tensor=4), total_bytes=total, footprint=half).parts
        assert parts["communication"] == pytest.approx((0.5 * (gathered / 4 + 0.5 * 4) + 0.1 / 4) * GB)


def test_ranks_that_compute_layers_together_share_all_of_them() -> None:
    alone, shared = memory(Division()).parts, memory(Division(2, tensor=2)).parts
    for part in ("weights", "optimizer", "activations", "temporary"):
        assert shared[part] == pytest.approx(alone[part] / 2)


def test_gradients_stay_where_batches_make_a_step_and_averages_are_another_copy() -> None:
    assert memory(Division()).parts["gradients"] == 0, "at the fullest moment there are none yet"
    assert memory(Division(), accumulates=True).parts["gradients"] == 4 * GB
    assert memory(Division(), averaged=True).parts["averaged"] == 4 * GB
    more = memory(Division(), averaged=True)
    assert more.allocated == pytest.approx(memory(Division()).allocated + 4 * GB)
    assert more.peak == pytest.approx(more.allocated + more.parts["slack"] + more.parts["context"])


def test_averages_have_buffers_of_their_own() -> None:
    buffered = replace(FOOTPRINT, state=replace(STATE, buffer_bytes=3 * GB))
    assert memory(Division(4, weights=True), True, footprint=buffered).parts["averaged"] == (1 + 3) * GB


@settings(max_examples=30)
@given(ranks=st.integers(2, 64), ema=st.booleans(), accumulates=st.booleans())
def test_more_ranks_never_need_more(ranks: int, ema: bool, accumulates: bool) -> None:
    fewer, more = (memory(Division(count, weights=True), ema, accumulates).peak for count in (ranks, ranks + 1))
    assert more <= fewer
    assert least_bytes(STATE, Division(ranks, weights=True)) <= memory(Division(ranks, weights=True)).allocated
    assert memory(Division(ranks), ema, accumulates).peak == memory(Division(2), ema, accumulates).peak


def test_what_does_not_depend_on_the_batch_does_not_grow_with_it() -> None:
    one = replace(FOOTPRINT, batch=8, passes=(Moment(5 * GB, 1 * GB, 2 * GB, 1 * GB, 0.5 * GB, 0.25 * GB),))
    (moment,) = scaled(one, 24).passes
    assert (moment.activations, moment.gradients, moment.temporary) == (13 * GB, 1 * GB, 5 * GB)
    assert moment.passing == 5.75 * GB
    assert scaled(one, 2400).passes[0].passing - scaled(one, 2400).passes[0].temporary == CHUNK_BYTES
    assert scaled(one, 8) == one


def test_with_the_batch_grows_what_is_not_of_the_weights() -> None:
    one = replace(FOOTPRINT, passes=(Moment(20 * GB, 4 * GB, 3 * GB, 2 * GB, 1 * GB),))
    assert scaled(one, 16).passes == (Moment(38 * GB, 4 * GB, 5 * GB, 2 * GB, 1 * GB),)
    assert scaled(one, 16).flops == 2 * one.flops
    assert scaled(one, one.batch) == one


def test_alike_kernels_are_counted_together() -> None:
    one = replace(PRODUCT, count=1)
    assert set(summed([one, PRODUCT, replace(one, flops=2.0)])) == {
        replace(PRODUCT, count=101),
        replace(one, flops=2.0),
    }


@settings(max_examples=30)
@given(flops=st.floats(0, 1e15), moved=st.floats(0, 1e11), more=st.floats(1, 100))
def test_more_arithmetic_or_traffic_is_never_faster(flops: float, moved: float, more: float) -> None:
    def of(flops: float, moved: float) -> float:
        costs = (Cost("matrix", "bf16", flops, moved, 3),)
        return seconds(footprint=replace(FOOTPRINT, pass_costs=costs)).seconds

    assert of(flops, moved) <= of(more * flops, moved)
    assert of(flops, moved) <= of(flops, more * moved)


def test_a_faster_card_is_never_slower() -> None:
    times = [seconds(card).seconds for card in ("B200", "H100", "A100-80GB", "A10")]
    assert times == sorted(times)
    assert seconds("H200").seconds <= seconds("H100").seconds


def test_the_time_is_that_of_the_arithmetic_where_that_is_more() -> None:
    footprint = replace(FOOTPRINT, state=replace(STATE, update_costs=()))
    found = seconds(footprint=footprint)
    assert found.seconds >= FOOTPRINT.flops / card_named("H100").rates["bf16"]
    assert found.low < found.seconds < found.high


def test_ranks_that_share_layers_wait_for_what_they_send_within_them() -> None:
    """As many bytes as four all-reduces of each block's input, which nothing hides."""
    assert layers_bytes(FOOTPRINT, Division(4, weights=True)) == 0
    assert layers_bytes(FOOTPRINT, Division(2, tensor=2)) == pytest.approx(4 * 10 * 1e7)
    assert layers_bytes(FOOTPRINT, Division(4, tensor=4)) == pytest.approx(6 * 10 * 1e7)
    times = [seconds(division=Division(2, tensor=2), footprint=replace(FOOTPRINT, stream_bytes=one)) for one in (0, GB)]
    longer = 4 * 10 * GB / card_named("H100").link_rate
    assert times[1].seconds - times[0].seconds == pytest.approx(longer) == times[1].exchange - times[0].exchange


def test_a_step_that_is_not_captured_is_as_long_as_its_launches() -> None:
    """Of a small batch: with more GPUs it becomes no shorter, and of whole weights in a graph it does."""
    small = scaled(FOOTPRINT, 1)
    many = replace(small, state=replace(STATE, blocks=1000, update_costs=()), pass_costs=(), stream_bytes=0.0)
    for division in (Division(4, weights=True), Division(4, tensor=4), Division(4, weights=True, tensor=2)):
        again = replace(division, ranks=8)
        assert seconds(division=division, footprint=many).seconds > 1
        assert seconds(division=division, footprint=many).seconds == seconds(division=again, footprint=many).seconds
    both, one = (seconds(division=Division(4, weights, 2), footprint=many) for weights in (True, False))
    assert both.seconds > one.seconds
    assert seconds(division=Division(4), footprint=many).seconds < 1


def test_one_gpu_sends_nothing_and_a_slow_link_takes_longer() -> None:
    assert exchanged_bytes(FOOTPRINT, Division()) == 0 == seconds().exchange
    assert exchanged_bytes(FOOTPRINT, Division(2)) == pytest.approx(4 * GB)
    assert exchanged_bytes(FOOTPRINT, Division(8)) == pytest.approx(7 * GB)
    linked = card_named("H100")
    slow = replace(linked, link_rate=linked.link_rate / 10)
    times = [step_time(FOOTPRINT, card, "bf16", Division(8), 1, True, False) for card in (linked, slow)]
    assert times[1].seconds - times[0].seconds == pytest.approx(times[1].exchange - times[0].exchange)
    assert times[1].exchange == pytest.approx(10 * times[0].exchange)
