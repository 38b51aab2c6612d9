"""What a training's environment has besides."""

from hotloop.core.environment import TRAINING, for_training


def test_what_is_set_stays_and_the_rest_is_added() -> None:
    given = {"GOMP_SPINCOUNT": "7", "HOME": "/home"}
    assert for_training(given) == {**TRAINING, **given}


def test_an_allocator_that_is_set_by_its_older_name_is_left_alone() -> None:
    assert "PYTORCH_ALLOC_CONF" not in for_training({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"})
    assert for_training({"PYTORCH_ALLOC_CONF": "backend:native"})["PYTORCH_ALLOC_CONF"] == "backend:native"
