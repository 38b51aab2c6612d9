"""Language modelling: predict each token from those before it."""

import inspect
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotloop.core.errors import InputError
from hotloop.core.job import Job, TokensTask
from hotloop.core.objects import load_object
from hotloop.data.dataset import Dataset
from hotloop.data.tokens import TokenWindows
from hotloop.tasks.task import IGNORED, Split, Task, Tensors
from hotloop.tasks.transformers import SHAPES, build_decoder


class LanguageModelling(Task):
    """Token files to next tokens.

    A model of one's own ("module:callable", given `vocabulary` and `context` if it takes them) maps tokens, int64
    (B, T), to logits, (B, T, V). If its `forward` takes `targets` as well, it returns their mean loss instead.
    """

    prepare_is_pure = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert isinstance(job.task, TokensTask)
        self.settings = job.task
        self.tokens_per_sample = job.task.context
        self.model_on_meta = job.model.name in SHAPES
        self._takes_targets = True

    def data(self, split: Split) -> Dataset | None:
        path = self.job.data.train if split == "train" else self.job.data.val
        return TokenWindows(path, self.settings.context, self.settings.vocabulary) if path else None

    def model(self) -> nn.Module:
        name, arguments = self.job.model.name, self.job.model.arguments
        sizes = {"vocabulary": self.settings.vocabulary, "context": self.settings.context}
        if name in SHAPES:
            return build_decoder(name, **sizes, arguments=arguments)
        if ":" not in name:
            near = get_close_matches(name, SHAPES, n=1)
            fix = f'--set model.name="{near[0] if near else "gpt2"}", or "module:callable" for your own'
            raise InputError(f'unknown language model "{name}"', f"there are {', '.join(SHAPES)}", fix)
        build = load_object(name, "model.name")
        taken = inspect.signature(build).parameters
        try:
            model: Any = build(**{key: value for key, value in sizes.items() if key in taken}, **arguments)
        except TypeError as error:
            raise InputError(f"model.arguments do not fit {name}", str(error), "--set model.arguments={}") from error
        if not isinstance(model, nn.Module):
            raise InputError(
                f'model.name = "{name}" gave a {type(model).__name__}', "a model is a torch.nn.Module", "return one"
            )
        self._takes_targets = "targets" in inspect.signature(model.forward).parameters
        return model

    def prepare(self, batch: Tensors, training: bool) -> Tensors:
        tokens = batch["tokens"].long()
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def forward(self, model: nn.Module, batch: Tensors) -> Tensor:
        result: Tensor = model(batch["inputs"], batch["targets"]) if self._takes_targets else model(batch["inputs"])
        return result

    def loss(self, outputs: Tensor, batch: Tensors) -> Tensor:
        if self._takes_targets:
            return outputs
        return functional.cross_entropy(outputs.flatten(0, 1).float(), batch["targets"].flatten())

    @property
    def padding_obstacle(self) -> str:
        own = self._takes_targets and self.job.model.name not in SHAPES
        return f"{self.job.model.name} makes its own loss, of all targets" if own else ""

    def ignore(self, batch: Tensors, valid: Tensor) -> Tensors:
        return {**batch, "targets": torch.where(valid[:, None], batch["targets"], IGNORED)}

    def metrics(self, outputs: Tensor, batch: Tensors) -> dict[str, Tensor]:
        return {"bits_per_token": self.loss(outputs, batch) / 0.6931471805599453}
