"""Rooms that batches are put into again and again."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotloop.train.device_slots import Rooms, addresses


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=4),
            st.sampled_from([torch.uint8, torch.bool, torch.int64, torch.float32, torch.bfloat16, torch.complex64]),
            st.sampled_from(["plain", "transposed", "expanded", "channels_last", "strided"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_put_into_a_room_is_what_is_there(kinds: list[tuple[list[int], torch.dtype, str]]) -> None:
    rooms = Rooms()
    for number, (shape, dtype, layout) in enumerate(kinds):
        tensor = torch.full(shape, number + 1).to(dtype)
        tensor.view(-1)[::2] = 0
        match layout:
            case "transposed" if shape:
                tensor = tensor.transpose(0, -1)
            case "expanded" if shape and shape[0]:
                tensor = tensor[:1].expand(3, *tensor.shape[1:])
            case "strided" if shape:
                tensor = tensor[..., ::2]
            case "channels_last" if tensor.ndim == 4:
                tensor = tensor.to(memory_format=torch.channels_last)
        room = rooms.copy(0, tensor)
        assert torch.equal(room, tensor)
        assert room.dtype == dtype
        assert room.stride() == torch.empty_like(tensor).stride()


def test_a_room_stays_where_it_is_until_a_larger_tensor_comes() -> None:
    rooms = Rooms()
    whole = addresses([rooms.copy(0, torch.ones(8, 4)), rooms.copy(1, torch.ones(8))])
    assert len(set(whole)) == 2
    for _ in range(2):
        assert addresses([rooms.copy(0, torch.ones(5, 4)), rooms.copy(1, torch.ones(5))]) == whole
        assert addresses([rooms.copy(0, torch.ones(8, 4)), rooms.copy(1, torch.ones(8))]) == whole
    assert addresses([rooms.copy(0, torch.ones(1 << 20))]) != whole[:1]


def test_other_tensors_have_no_room() -> None:
    room = Rooms().copy(0, torch.ones(3))
    assert not addresses([room, torch.ones(3)])
    assert not addresses([room[:2]])


def test_another_layout_in_the_same_place_is_another_room() -> None:
    rooms = Rooms()
    plain = torch.ones(2, 3, 4, 4)
    there = addresses([rooms.copy(0, plain)])
    other = addresses([rooms.copy(0, plain.to(memory_format=torch.channels_last))])
    assert there[0][0] == other[0][0]
    assert there != other


def test_rooms_of_an_inference_serve_a_training() -> None:
    rooms = Rooms()
    with torch.inference_mode():
        rooms.copy(0, torch.ones(3))
    weight = torch.ones(3, requires_grad=True)
    (rooms.copy(0, torch.ones(3)) * weight).sum().backward()
    assert weight.grad is not None
