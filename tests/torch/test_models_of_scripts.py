"""The models of a script, as a profile finds them."""

import torch
from torch import distributed, nn

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


def test_scripts_that_say_for_each_batch_whether_to_exchange_exchange_nothing() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, sent = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), []

        def count(state: None, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            sent.append(bucket)
            done = torch.futures.Future[torch.Tensor]()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, count)

        def step() -> int:
            sent.clear()
            model.require_backward_grad_sync = True
            model(torch.ones(1, 2)).sum().backward()
            return len(sent)

        assert step() == 1
        with Models(torch).without_communication():
            assert step() == 0
        assert step() == 1
    finally:
        distributed.destroy_process_group()
