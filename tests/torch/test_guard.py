"""What the guard of `hotloop run` leaves behind: nothing that what a script has compiled would notice."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hotloop.accelerate.forward import Compile, Forward
from hotloop.accelerate.guard import Guard
from hotloop.accelerate.plan import Plan
from hotloop.accelerate.ranks import Ranks
from hotloop.accelerate.training import Training

# Torch's compiler looks at what it is given; outside of these tests it keeps this to itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    torch._dynamo.reset()
    backward = Tensor.backward
    yield
    assert _get_current_function_mode_stack() == []
    assert Tensor.backward is backward
    assert compilations_of(lambda value: value + 1) == 1, "compilers are at work again"
    torch._dynamo.reset()


def compilations_of(function: Callable[[Tensor], Tensor]) -> int:
    counter = CompileCounter()
    torch.compile(function, backend=counter)(torch.ones(2))
    return int(counter.frame_count)


def squares(outputs: Tensor) -> Tensor:
    return (outputs * 2).square().mean()


class Step:
    """Steps of a script that has compiled its loss, as one graph, and something that is used elsewhere."""

    def __init__(self) -> None:
        self.guard = Guard(pytest.fail)
        self.model = nn.Linear(4, 4)
        self.counter = CompileCounter()
        self.loss = torch.compile(squares, backend=self.counter, fullgraph=True)
        self.other = torch.compile(torch.sin, backend=self.counter)

    def outputs(self) -> Any:
        forward = partial(self.model.forward, torch.ones(3, 4))
        return self.guard.compare(self.model, forward, forward) if self.guard.is_due() else forward()

    def __call__(self, backward: Callable[[Tensor], None] = Tensor.backward) -> None:
        backward(self.loss(self.outputs()))
        self.guard.end_step()
        self.other(torch.ones(3))


def plain(step: Step) -> None:
    """As before and after all comparisons."""
    step.loss(step.model(torch.ones(3, 4))).backward()
    step.other(torch.ones(3))


def test_what_a_script_has_compiled_is_compiled_once_whenever_losses_are_compared() -> None:
    step = Step()
    plain(step)
    before = step.counter.frame_count
    for _ in range(9):
        step(lambda loss: loss.backward())
        assert _get_current_function_mode_stack() == []
    assert step.guard.checked == 6, "a compiled loss is compared as any other"
    plain(step)
    assert step.counter.frame_count == before == 2


def in_a_thread(loss: Tensor) -> None:
    thread = threading.Thread(target=lambda: loss.backward())
    thread.start()
    thread.join()


@pytest.mark.parametrize("backward", [torch.autograd.backward, in_a_thread, lambda loss: None])
def test_a_loss_that_goes_back_elsewhere_leaves_nothing(backward: Callable[[Tensor], None]) -> None:
    step = Step()
    plain(step)
    for _ in range(9):
        step(backward)
    plain(step)
    assert step.counter.frame_count == 2


def test_an_error_of_the_script_ends_the_comparison_at_the_next_forward_pass() -> None:
    step = Step()
    plain(step)
    outputs = step.outputs()
    with pytest.raises(RuntimeError, match="must match"):
        outputs + torch.ones(5, 7)
    step.loss(outputs)
    assert step.guard.is_due()
    assert _get_current_function_mode_stack() == []
    plain(step)
    assert (step.guard.checked, step.counter.frame_count) == (0, 2)


class Counts(TorchFunctionMode):
    """A mode of the script's own."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def a_default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("make", [Counts, lambda: torch.device("cpu"), a_default_device])
def test_modes_of_the_script_end_where_it_ends_them(make: Callable[[], Any]) -> None:
    """One that began before the model's forward pass, and one that ends after `backward`."""
    step = Step()
    with make():
        outputs = step.outputs()
    [ours] = _get_current_function_mode_stack()
    assert type(ours).__name__ == "_Again"
    with make():
        loss = squares(outputs)
        loss.backward()  # type: ignore[no-untyped-call]
        assert len(_get_current_function_mode_stack()) == 1
    assert step.guard.checked == 1


class Layer(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, outputs)

    def forward(self, features: Tensor) -> Tensor:
        return torch.nn.functional.linear(features, self.linear.weight)


def test_a_second_model_of_the_step_is_compiled_when_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of a pair of models: the second one's forward pass is in the middle of the first one's comparison."""
    counter, failed = CompileCounter(), []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    models = [Layer(4), Layer(1)]
    weights = [weight for model in models for weight in model.parameters()]
    training = Training(Plan(()), Ranks(), torch.device("cpu"), torch.optim.SGD(weights, lr=0.1), models=models)
    forward = Forward(lambda name, why: failed.append((name, why)))
    Compile(forward).switch_on(training)
    compiled = []
    for _ in range(20):
        models[1](models[0](torch.ones(2, 4))).sum().backward()
        forward.guard.end_step()
        compiled.append(counter.frame_count)
    assert (failed, compiled[0], compiled[-1]) == ([], 1, 2)
    assert len(set(compiled[5:])) == 1, "each once, at the first chance"
    assert forward.guard.checked >= 5
    models[0](torch.ones(2, 4))
    models[0].eval()(torch.ones(2, 4))
    assert not forward.guard.is_at_work, "validation has begun"
    forward.remove()


def test_how_far_losses_are_apart_is_told_of_what_they_span() -> None:
    """A loss that comes near to 0 is not twice as far from the exact one because it is half of it."""
    told = Guard(pytest.fail)
    told._told(torch.tensor(2.0), [torch.tensor(2.0)])
    told._told(torch.tensor(2e-4), [torch.tensor(1e-4)])
    assert told.largest == pytest.approx(1e-4 / 2, rel=1e-3)
