"""The models of a script, as a profile finds them."""

import torch
from torch import nn

from hotloop.profile.models import Models


class Unfinished(nn.Module):
    """Whose __init__ has not called torch's."""

    def __init__(self) -> None:
        self.__dict__["early"] = 1


def test_what_is_no_model_on_a_gpu_is_passed_over() -> None:
    there = [Unfinished(), nn.Linear(2, 2), torch.jit.ScriptModule(), nn.DataParallel(nn.Linear(2, 2))]
    models = Models(torch)
    assert models.in_float32 == models.on_several_gpus == models.distributed == []
    with models.under_autocast(), models.first_part_alone():
        assert there[1](torch.ones(1, 2)).dtype == there[3](torch.ones(1, 2)).dtype == torch.float32
    assert models.objection == "the script calls no model as a whole"
