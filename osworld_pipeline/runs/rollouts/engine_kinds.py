"""Opens the policy engine that a recipe names: one of ours, or one of another distribution."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.adapters import whole_weights_folder
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import DependencyError, PipelineError, RecipeError
from osworld_pipeline.protocols import PolicyEngine
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.engine_names import ENTRY_POINTS, OPENAI, SGLANG, TRANSFORMERS
from osworld_pipeline.recipes.schema import LoraSection


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What an engine is opened for."""

    recipe: Recipe
    """Its section `engine` has the engine's settings; those of another distribution's are in `engine.options`."""
    folder: Path | None = None
    """The checkpoint that is sampled. It is given to `load_weights` before the first request, except for an engine in
    this process, which opens it."""
    model: Any = None
    """The trainer's own model, for an engine in this process."""
    processor: Any = None
    """Of the checkpoint; None only for an engine that uses the chat API."""
    policy_version: int = 0
    """Of the checkpoint."""
    cache: PixelCache | None = None
    adapters: LoraSection | None = None
    token: str | None = None
    """Of the engine's servers."""
    owner: str = ""
    """The name under which servers know the engines of a run."""

    @property
    def renderer(self) -> Renderer:
        """Lays out prompts; it knows the ids that an engine must not sample (`banned_ids`)."""
        return Renderer(self.processor)


OpenEngine = Callable[[EngineRequest], PolicyEngine]


def open_engine(request: EngineRequest) -> PolicyEngine:
    """
    Raises:
        RecipeError: there is no policy to sample from.
        DependencyError: another distribution's engine cannot be opened; names it.
        EngineError: as the engine.
    """
    name = request.recipe.engine.kind
    if name in (TRANSFORMERS, SGLANG) and (
        request.processor is None or (request.model is None and request.folder is None)
    ):
        raise RecipeError(f"engine.kind {name} samples from a checkpoint, and there is none")
    opens = _OURS.get(name)
    return opens(request) if opens is not None else _of_another_distribution(name, request)


def _of_another_distribution(name: str, request: EngineRequest) -> PolicyEngine:
    point = {point.name: point for point in entry_points(group=ENTRY_POINTS)}.get(name)
    if point is None:
        raise DependencyError(f"no engine is named {name!r} on this machine: install the distribution that has it")
    origin = f"the engine {name!r} of {point.dist.name if point.dist else point.value}"
    try:
        return point.load()(request)
    except PipelineError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise DependencyError(f"{origin} cannot be opened ({error}); check engine.options, or update it") from error


def _openai(request: EngineRequest) -> PolicyEngine:
    from osworld_pipeline.rollout.engines.openai import OpenAiEngine

    section = request.recipe.engine
    return OpenAiEngine(section.urls[0], section=section, token=request.token)


def _sglang(request: EngineRequest) -> PolicyEngine:
    from osworld_pipeline.rollout.engines.sglang import SglangEngine
    from osworld_pipeline.rollout.engines.sglang_weights import vocab_size_of

    section = request.recipe.engine
    if request.folder is None:
        raise RecipeError("engine.kind sglang samples from a checkpoint's folder, and there is none")
    return SglangEngine(
        section.urls,
        renderer=request.renderer,
        section=section,
        vocab_size=vocab_size_of(request.folder),
        owner=request.owner,
        policy_version=request.policy_version,
        token=request.token,
    )


def _transformers(request: EngineRequest) -> PolicyEngine:
    from osworld_pipeline.rollout.engines.transformers import TransformersEngine

    recipe, folder, model = request.recipe, request.folder, request.model
    return TransformersEngine(
        model if model is not None else load_frozen(recipe, folder, adapters=request.adapters),
        request.processor,
        device=_device(model),
        policy_version=request.policy_version,
        timeout_s=recipe.gspo.turn_timeout_s,
        max_batch=recipe.engine.max_batch,
        reuse_kv_cache=recipe.engine.reuse_kv_cache,
        cache=request.cache,
        base_folder=None if folder is None else whole_weights_folder(folder),
    )


_OURS: Mapping[str, OpenEngine] = {TRANSFORMERS: _transformers, SGLANG: _sglang, OPENAI: _openai}


def load_frozen(
    recipe: Recipe, folder: Path | None, *, adapters: LoraSection | None = None, device: str | None = None
) -> Any:
    """The model of a checkpoint, for sampling; by default on this process's GPU, or on the CPU if there is none."""
    from osworld_pipeline.training.model import load_policy

    assert folder is not None, "a model or a folder is checked by the caller"
    place = _device(None) if device is None else device
    return load_policy(folder, recipe.model, device=place, is_frozen=True, adapters=adapters)


def _device(model: Any) -> Any:
    """The device of the model, or of a new one."""
    import torch

    if model is not None:
        return next(model.parameters()).device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
