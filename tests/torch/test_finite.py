import math

import pytest
import torch

from hotloop.core.errors import NonFiniteLoss
from hotloop.train.losses import check_finite

FINITE = {
    "float16 whose square overflows": torch.full((1000, 1000), 100.0, dtype=torch.float16),
    "float32 whose square overflows": torch.full((10,), 3e19),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "integers": torch.ones(3, dtype=torch.int8),
    "nothing": torch.ones(0),
}


def test_finite_weights_pass_whatever_their_type_and_size() -> None:
    check_finite([torch.ones(3), *FINITE.values()], 1)


def test_a_rank_without_weights_saves_too() -> None:
    """As the second of two that divide a model of one row."""
    check_finite([torch.ones(0)], 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_one_weight_that_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    weights = torch.zeros(10_000, dtype=dtype)
    weights[1234] = value
    with pytest.raises(NonFiniteLoss, match="after step 7"):
        check_finite([*FINITE.values(), weights], 7)
