"""Checks whether a recipe fits a GPU, and finds changes that make it fit. Used by `osworld-pipeline doctor`, and by a
trainer on a GPU before it loads anything. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from osworld_pipeline.errors import TrainingError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.training.memory.estimate import GB, Estimate, Stage, estimate, largest_estimate
from osworld_pipeline.training.memory.model_shapes import ModelShape

MAX_RANKS = 64
"""More ranks than this are not proposed."""
MIN_CONTEXT_TOKENS = 4096
MIN_PIXELS = 200_000
LORA: Mapping[str, Any] = {"rank": 32, "alpha": 64}
"""Proposed if all weights are trained."""

Change = Mapping[str, Any]
"""Dotted keys of a recipe and their values."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    change: Change
    gpu_bytes: int
    """The recipe's need with the change."""

    @property
    def text(self) -> str:
        return ", ".join(f"{key}={_shown(value)}" for key, value in self.change.items())


@dataclass(frozen=True, kw_only=True)
class Fit:
    recipe: Recipe
    shape: ModelShape
    estimate: Estimate
    """Estimate of the stage with the largest need (`judge`), or of the stage that starts (`check_memory`)."""
    gpu_bytes: int | None
    """Memory of one GPU (`judge`), or its free memory (`check_memory`); None if unknown."""

    @property
    def is_ok(self) -> bool:
        return self.gpu_bytes is None or self.estimate.gpu_bytes <= self.gpu_bytes

    @property
    def sentence(self) -> str:
        num_ranks = self.recipe.trainer.num_processes
        ranks = "1 GPU" if num_ranks == 1 else f"each of {num_ranks} GPUs"
        needs = f"{self.recipe.name} needs {self.estimate.gpu_bytes / GB:.1f} GB of {ranks} ({self.estimate.stage})"
        if self.gpu_bytes is None:
            return needs
        largest = max(self.estimate.items, key=lambda item: item.gpu_bytes)
        verdict = "fits" if self.is_ok else "does not fit"
        return (
            f"{needs}, which {verdict} {self.gpu_bytes / GB:.1f} GB; "
            f"the largest item is {largest.name}, {largest.gpu_bytes / GB:.1f} GB"
        )

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """Changes that alone make it fit; if there are none, one combination that does, which adds the change with the
        largest savings at each step; empty if that does not make it fit, or nothing is needed."""
        if self.is_ok or self.gpu_bytes is None:
            return ()
        alone = [remedy for remedy in self._tried(self.recipe) if remedy.gpu_bytes <= self.gpu_bytes]
        if alone:
            return tuple(alone)
        joined, recipe, gpu_bytes = {}, self.recipe, self.estimate.gpu_bytes
        while gpu_bytes > self.gpu_bytes:
            best = min(self._tried(recipe), key=lambda remedy: remedy.gpu_bytes, default=None)
            if best is None or best.gpu_bytes >= gpu_bytes:
                return ()
            joined |= best.change
            recipe, gpu_bytes = _changed(recipe, best.change) or recipe, best.gpu_bytes
        return (Remedy(change=joined, gpu_bytes=gpu_bytes),)

    @property
    def advice(self) -> str:
        """The remedies in one line."""
        if not self.remedies:
            return "use larger GPUs, a smaller model, or sglang servers on GPUs of their own (engine.kind)"
        return "set " + "; or ".join(f"{remedy.text} ({remedy.gpu_bytes / GB:.1f} GB)" for remedy in self.remedies)

    def _tried(self, recipe: Recipe) -> Iterator[Remedy]:
        for change in _changes(recipe):
            for option in change:
                changed = _changed(recipe, option)
                if changed is None:
                    continue
                gpu_bytes = largest_estimate(changed, self.shape).gpu_bytes
                if option is change[-1] or (self.gpu_bytes is not None and gpu_bytes <= self.gpu_bytes):
                    yield Remedy(change=option, gpu_bytes=gpu_bytes)
                    break

    def as_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "ok": self.is_ok,
            "stage": self.estimate.stage,
            "num_ranks": self.recipe.trainer.num_processes,
            "gpu_bytes": self.gpu_bytes,
            "needs_gpu_bytes": self.estimate.gpu_bytes,
            "needs_host_bytes": self.estimate.host_bytes,
            "items": [
                {"name": item.name, "how": item.how, "gpu_bytes": item.gpu_bytes, "host_bytes": item.host_bytes}
                for item in self.estimate.items
            ],
            "remedies": [
                {"settings": dict(remedy.change), "needs_gpu_bytes": remedy.gpu_bytes} for remedy in self.remedies
            ],
        }


def judge(recipe: Recipe, shape: ModelShape, *, gpu_bytes: int | None) -> Fit:
    """Judges by the stage with the largest need."""
    return Fit(recipe=recipe, shape=shape, estimate=largest_estimate(recipe, shape), gpu_bytes=gpu_bytes)


def check_memory(recipe: Recipe, folder: Path, *, stage: Stage, gpu_bytes: int, may_sample: bool = True) -> None:
    """Run before the model in `folder` is loaded on a GPU with this amount of free memory; does nothing if
    trainer.check_memory is false. `may_sample`: as for `estimate`.

    Raises:
        TrainingError: it cannot fit; names the need and changes that would make it fit.
        StoreError: the folder does not contain the model's sizes.
    """
    if not recipe.trainer.check_memory:
        return
    shape = ModelShape.of_folder(folder)
    found = estimate(recipe, shape, stage, may_sample=may_sample)
    fit = Fit(recipe=recipe, shape=shape, estimate=found, gpu_bytes=gpu_bytes)
    if not fit.is_ok:
        raise TrainingError(f"{fit.sentence}: {fit.advice}, or trainer.check_memory=false to try anyway")


def _changes(recipe: Recipe) -> Iterator[Sequence[Change]]:
    """Options of each kind of change, the mildest first."""
    trainer, agent = recipe.trainer, recipe.agent
    if not trainer.activation_checkpointing:
        yield [{"trainer.activation_checkpointing": True}]
    ranks = [number for number in (2, 4, 8, 16, 32, MAX_RANKS) if number > trainer.num_processes]
    if ranks:
        yield [{"trainer.num_processes": number} for number in ranks]
    if not trainer.cpu_offload:
        yield [{"trainer.num_processes": max(2, trainer.num_processes), "trainer.cpu_offload": True}]
    if trainer.lora is None:
        yield [{"trainer.lora": LORA, **({"trainer.train_vision": False} if trainer.train_vision else {})}]
    if recipe.engine.kind == "transformers" and recipe.engine.max_batch > 1:
        batches = [recipe.engine.max_batch >> shift for shift in range(1, recipe.engine.max_batch.bit_length())]
        yield [{"engine.max_batch": number} for number in batches]
    if recipe.gspo.micro_batch_size > 1:
        yield [{"gspo.micro_batch_size": 1}]
    if trainer.max_tokens_per_batch > agent.max_context_tokens:
        yield [{"trainer.max_tokens_per_batch": agent.max_context_tokens}]
    half = agent.max_context_tokens // 2
    if half >= MIN_CONTEXT_TOKENS:
        yield [{"agent.max_context_tokens": half, "trainer.max_tokens_per_batch": half}]
    if agent.max_pixels // 2 >= MIN_PIXELS:
        yield [{"agent.max_pixels": agent.max_pixels // 2}]


def _changed(recipe: Recipe, change: Change) -> Recipe | None:
    """None if the recipe would be inconsistent."""
    data = recipe.model_dump(mode="json")
    for key, value in change.items():
        section, _, name = key.partition(".")
        data[section][name] = value
    try:
        return Recipe.model_validate(data)
    except ValidationError:
        return None


def _shown(value: Any) -> str:
    """The value in the syntax of --set."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_shown(one)}" for key, one in value.items()) + "}"
    return str(value)
