"""Language modelling, on text that ships with installed packages, by bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training import Told, run, stop_at
from torch.nn import functional

from hotloop import InputError
from hotloop.core.job import Job
from hotloop.core.job_file import parse_job
from hotloop.data.tokens import TokenWindows
from hotloop.tasks.cross_entropy import into_gradient, linear_cross_entropy
from hotloop.tasks.transformers import SHAPES, Decoder, build_decoder

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of numpy's random generators and of this project's tests' framework, as bytes."""
    folder = tmp_path_factory.mktemp("text")
    files = sorted(Path(np.__file__).parent.rglob("*.py"))[:60]
    tokens = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.uint16)
    np.save(folder / "train.npy", tokens[:20_000])
    np.save(folder / "val.npy", tokens[20_000:24_000])
    return folder


def small(text: Path, run_dir: Path, **changes: Any) -> Job:
    raw: dict[str, Any] = {
        "task": {"name": "tokens", "context": 32, "vocabulary": 256},
        "data": {"train": str(text / "train.npy"), "val": str(text / "val.npy"), "batch_size": 16, "workers": 0},
        "model": {"name": "gpt2", "arguments": {**SMALL, "kv_heads": 4}},
        "train": {"epochs": 2, "clip_norm": 1.0},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3},
        "log": {"every": 5, "tensorboard": False, "report": False},
        "run": {"dir": str(run_dir)},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        raw.setdefault(section, {})[name] = value
    return parse_job(raw, "job")


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b"])
def test_a_language_model_learns_text(text: Path, tmp_path: Path, name: str) -> None:
    sizes = SMALL if name.startswith("llama") else {**SMALL, "kv_heads": 4}
    told = Told()
    done, result = run(small(text, tmp_path / "run", model__name=name, model__arguments=sizes), told)
    losses = [record["loss"] for record in done.metrics() if record["event"] == "step"]
    assert losses[-1] < 0.65 * losses[0]
    assert result.metrics["val_bits_per_token"] == pytest.approx(result.metrics["val_loss"] / np.log(2))
    assert result.tokens_per_second == pytest.approx(32 * result.samples_per_second)
    assert 0 < result.mfu < 1
    assert result.flops_per_second == pytest.approx(result.mfu * result.matrix_flops_per_second)


@pytest.mark.slow
def test_a_stopped_run_continues_bit_for_bit(text: Path, tmp_path: Path) -> None:
    _, through = run(small(text, tmp_path / "a"))
    job = small(text, tmp_path / "b")
    _, first = run(job, stop_at(45))
    _, second = run(job)
    assert (first.status, second.status) == ("preempted", "finished")
    assert second.weights_sha256 == through.weights_sha256


@given(length=st.integers(40, 400), context=st.integers(1, 39), wide=st.booleans(), raw=st.booleans())
@settings(max_examples=40, deadline=None)
def test_windows_predict_every_token_once(
    tmp_path_factory: pytest.TempPathFactory, length: int, context: int, wide: bool, raw: bool
) -> None:
    vocabulary = 70_000 if wide else 1000
    tokens = (np.arange(length) * 97 % vocabulary).astype(np.uint32 if wide else np.uint16)
    file = tmp_path_factory.mktemp("tokens") / ("x.bin" if raw else "x.npy")
    tokens.tofile(file) if raw else np.save(file, tokens)
    windows = TokenWindows(str(file), context, vocabulary)
    samples = [windows.sample(index, np.random.default_rng())["tokens"] for index in range(len(windows))]
    predicted = np.concatenate([sample[1:] for sample in samples])
    assert np.array_equal(predicted, tokens[1 : 1 + len(windows) * context])
    assert length - 1 - len(predicted) < context
    assert all(np.array_equal(sample[:-1][1:], sample[1:][:-1]) for sample in samples)


@given(tokens=st.integers(1, 9), width=st.integers(1, 5), vocabulary=st.integers(2, 30), seed=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_linear_cross_entropy_is_the_plain_one(tokens: int, width: int, vocabulary: int, seed: int) -> None:
    """Loss and gradients against torch's own in float64."""
    draws = torch.Generator().manual_seed(seed)
    hidden, weight = (3 * torch.randn(n, width, generator=draws) for n in (tokens, vocabulary))
    targets = torch.randint(0, vocabulary, (tokens,), generator=draws)
    targets[1:][torch.rand(tokens - 1, generator=draws) < 0.3] = -100  # they do not count
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = functional.cross_entropy(exact[0] @ exact[1].T, targets)
    expected.backward()
    mine = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    loss = linear_cross_entropy(mine[0], mine[1], targets)
    (3 * loss).backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    for one, other in zip(mine, exact, strict=True):
        assert torch.allclose(one.grad.double(), 3 * other.grad, atol=1e-5)


def test_without_targets_that_count_gradients_are_zero() -> None:
    """As torch's: the loss is 0 / 0, its gradient nothing."""
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    loss.backward()
    assert loss.isnan()
    assert not hidden.grad.any()
    assert not weight.grad.any()
    assert linear_cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.long)).isnan()


def test_linear_cross_entropy_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(50, 8), torch.randn(20, 8), torch.randint(0, 20, (50,))
    gradients = []
    for size in (1 << 30, 20 * 4 * 7):
        monkeypatch.setattr("hotloop.tasks.cross_entropy.CHUNK_BYTES", size)
        own = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        linear_cross_entropy(own[0], own[1], targets).backward()
        gradients.append([tensor.grad for tensor in own])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("tokens", [64, 65])
def test_weights_in_16_bits_have_gradients_in_16_bits(tokens: int) -> None:
    """As divided weights are gathered; of up to twice as many tokens as the width, from all logits at once."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, 32), torch.randn(80, 32) / 4
    targets = torch.randint(0, 80, (tokens,))
    targets[::5] = -100
    own = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
    exact = [tensor.detach().double().requires_grad_() for tensor in own]
    loss = linear_cross_entropy(own[0], own[1], targets)
    expected = functional.cross_entropy(exact[0] @ exact[1].T, targets)
    (loss / 3).backward()
    (expected / 3).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for mine, theirs in zip(own, exact, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert ((mine.grad - theirs.grad).norm() / theirs.grad.norm()).item() < 1e-2


def test_huge_logits_give_a_finite_loss() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [float("-inf"), 0.0, 0.0]])
    losses = into_gradient(logits, torch.tensor([0, 1]))
    assert losses.tolist() == pytest.approx([0.0, np.log(2)])
    assert torch.allclose(logits, torch.tensor([[0.0, 0, 0], [0, -0.5, 0.5]]))


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_have_their_published_sizes(name: str) -> None:
    published = {
        "gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-large": 774e6, "gpt2-xl": 1558e6,
        "llama-3.2-1b": 1.24e9, "llama-3.2-3b": 3.21e9, "llama-3-8b": 8.03e9,
    }  # fmt: skip
    llama = name.startswith("llama")
    with torch.device("meta"):
        model = Decoder(SHAPES[name], 128_256 if llama else 50_257, 1024)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(published[name], rel=0.01)


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b"])
def test_a_decoder_sees_only_the_past(name: str) -> None:
    torch.manual_seed(0)
    sizes = SMALL if name.startswith("llama") else {**SMALL, "kv_heads": 4}
    model = build_decoder(name, 50, 16, sizes)
    tokens = torch.randint(0, 50, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-3)
    own = functional.cross_entropy(before.flatten(0, 1), tokens.flatten())
    assert model(tokens, tokens).item() == pytest.approx(own.item(), rel=1e-5)


def test_rotary_positions_depend_on_distance_alone() -> None:
    from hotloop.tasks.transformers import _angles, _rotate

    angles = _angles(64, 8, 10_000.0)
    q, k = torch.randn(2, 8).unbind()
    at = [
        (_rotate(q.view(1, 8), angles[i : i + 1].cos(), angles[i : i + 1].sin())
         * _rotate(k.view(1, 8), angles[j : j + 1].cos(), angles[j : j + 1].sin())).sum().item()
        for i, j in ((5, 2), (33, 30), (60, 57))
    ]  # fmt: skip
    assert at == pytest.approx([at[0]] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__train": "nowhere.npy"}, "cannot read tokens from nowhere.npy"),
        ({"task__context": 100_000}, r"holds 20,000 tokens, a window takes 100,001"),
        ({"model__name": "gtp2"}, 'unknown language model "gtp2"'),
        ({"model__arguments": {"layers": 2, "heads": 5}}, "heads must divide the width"),
        ({"model__arguments": {"heads": 0}}, r"model.arguments = {'heads': 0}"),
        ({"model__arguments": {"layers": 2.5}}, r"model.arguments = {'layers': 2.5}"),
        ({"model__name": "llama-3.2-1b", "model__arguments": {"width": 24, "heads": 8, "kv_heads": 8}}, "3 wide"),
        ({"model__arguments": {"layer": 2}}, "unexpected keyword argument 'layer'"),
        ({"model__name": "tiny:not_a_model"}, "gave a str"),
    ],
)
def test_bad_input_is_told(text: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(small(text, tmp_path / "run", **{"model__arguments": {}, **changes}))
    assert not (tmp_path / "run").exists()


def test_a_model_that_makes_its_own_loss_is_not_padded(text: Path, tmp_path: Path) -> None:
    changes = {"model__name": "hotloop.tasks.transformers:build_decoder", "data__last_batch": "pad"}
    arguments = {"name": "gpt2", "arguments": {**SMALL, "kv_heads": 4}}
    with pytest.raises(InputError, match="would change what is trained") as caught:
        run(small(text, tmp_path / "run", model__arguments=arguments, **changes))
    assert "makes its own loss" in caught.value.cause


@pytest.mark.parametrize("last_batch", ["keep", "pad"])
def test_a_short_last_batch_of_tokens_counts_the_same(text: Path, tmp_path: Path, last_batch: str) -> None:
    changes = {"data__batch_size": 48, "train__epochs": 1, "log__every": 1}
    done, _ = run(small(text, tmp_path / last_batch, data__last_batch=last_batch, **changes))
    other, _ = run(small(text, tmp_path / "other", **changes))
    losses = [[record["loss"] for record in one.metrics() if record["event"] == "step"] for one in (done, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_token_beyond_the_vocabulary_is_named(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not below task\.vocabulary = 64"):
        run(small(text, tmp_path / "run", task__vocabulary=64))


def test_floats_are_no_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(100))
    with pytest.raises(InputError, match="holds float64"):
        len(TokenWindows(str(tmp_path / "x.npy"), 4, 100))
