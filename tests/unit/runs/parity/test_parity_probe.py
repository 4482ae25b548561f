"""An engine that does not sample from the checkpoint is refused before anything is spent, and its defect is named; a
healthy one passes in every precision."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from defective_engine import DEFECTS, DefectiveEngine

from osworld_pipeline.agent.parity_cases import parity_cases
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.recipes.schema import TinyModelSection
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.runs.parity.probe import ParityReport, probe_parity
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import build_model

Make = Callable[..., Any]
SCALE = 4.0
"""Fresh weights give nearly equal logits; larger ones make choices, as trained weights do."""


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """Screens of 40 tokens, because the stub computes each of them again at every token."""
    return load_recipe("smoke", settings=["agent.max_pixels=40960"])


@pytest.fixture(scope="module")
def make_model(tiny_folder: Path, renderer: Renderer) -> Make:
    """The tiny checkpoint's model; with a seed, another model of the same shape."""

    def make(*, dtype: str = "float32", seed: int | None = None, scale: float = SCALE) -> Any:
        model = load_model(tiny_folder, dtype=dtype, is_frozen=True)
        if seed is not None:
            spec = TinyModelSection(
                kind="tiny", hidden_size=64, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=512,
                seed=seed,
            )  # fmt: skip
            model.load_state_dict(build_model(spec, renderer.tokenizer).state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(scale)
        return model

    return make


async def probe(engine: Any, reference: Any, recipe: Recipe, renderer: Renderer) -> ParityReport:
    return await probe_parity(
        engine,
        {"the stub": engine.generate},
        recipe=recipe,
        renderer=renderer,
        load_reference=lambda device: reference,
    )


@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("bfloat16", 1e-2)])
async def test_a_healthy_engine_passes_in_each_precision(
    dtype: str, rounding: float, scale: float, make_model: Make, recipe: Recipe, renderer: Renderer
) -> None:
    model = make_model(dtype=dtype, scale=scale)
    report = await probe(DefectiveEngine(model=model, renderer=renderer), model, recipe, renderer)
    assert report.num_tokens >= 40
    assert report.mean_diff < rounding


@pytest.mark.parametrize("reuse_kv_cache", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_transformers_engine_passes_in_seconds_and_keeps_nothing_of_the_probe(
    dtype: str, reuse_kv_cache: bool, make_model: Make, recipe: Recipe, renderer: Renderer
) -> None:
    model = make_model(dtype=dtype)
    engine = TransformersEngine(model, renderer.processor, reuse_kv_cache=reuse_kv_cache)
    try:
        report = await probe(engine, model, recipe, renderer)
        assert engine.num_kept_bytes == 0
    finally:
        await engine.close()
    assert report.seconds < 10


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.0), ("bfloat16", SCALE)])
@pytest.mark.parametrize("defect", DEFECTS)
async def test_an_engine_with_a_known_defect_is_refused_by_name_in_seconds(
    defect: str, dtype: str, scale: float, make_model: Make, recipe: Recipe, renderer: Renderer
) -> None:
    model = make_model(dtype=dtype, scale=scale)
    engine = DefectiveEngine(model=model, renderer=renderer, defect=defect)
    started = time.process_time()
    with pytest.raises(EngineError) as refused:
        await probe(engine, model, recipe, renderer)
    assert f"the stub fails the parity probe: it {DEFECTS[defect]}." in str(refused.value)
    assert time.process_time() - started < 10


async def test_an_engine_with_other_weights_is_refused_for_that_reason(
    make_model: Make, recipe: Recipe, renderer: Renderer
) -> None:
    for dtype, scale in (("float32", 1.0), ("bfloat16", SCALE)):
        engine = DefectiveEngine(model=make_model(dtype=dtype, seed=1, scale=scale), renderer=renderer)
        with pytest.raises(EngineError, match="it samples from other weights than this checkpoint's"):
            await probe(engine, make_model(dtype=dtype, scale=scale), recipe, renderer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_image_features_that_outlive_a_change_of_weights_are_named(
    dtype: str, make_model: Make, recipe: Recipe, renderer: Renderer
) -> None:
    """The probe of the first weights has shown the engine every image that the second one shows."""
    old, new = make_model(dtype=dtype, seed=1), make_model(dtype=dtype)
    engine = DefectiveEngine(model=old, renderer=renderer, keeps_features=True)
    await probe(engine, old, recipe, renderer)
    engine.change_weights(new)
    with pytest.raises(EngineError, match=r"it uses image features that differ .* SGLANG_VLM_CACHE_SIZE_MB=0"):
        await probe(engine, new, recipe, renderer)
    engine.keeps_features = False
    engine.change_weights(new)
    await probe(engine, new, recipe, renderer)


async def test_a_log_probability_that_is_not_a_number_never_counts_as_rounding(
    make_model: Make, recipe: Recipe, renderer: Renderer
) -> None:
    model = make_model()

    class Broken(DefectiveEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            result = await super().generate(request)
            return replace(result, logprobs=(math.nan, *result.logprobs[1:]))

    with pytest.raises(EngineError, match="fails the parity probe"):
        await probe(Broken(model=model, renderer=renderer), model, recipe, renderer)


async def test_each_server_is_probed_and_the_one_that_fails_is_named(
    make_model: Make, recipe: Recipe, renderer: Renderer
) -> None:
    model = make_model()
    good = DefectiveEngine(model=model, renderer=renderer)
    bad = DefectiveEngine(model=model, renderer=renderer, defect="blind")
    with pytest.raises(EngineError, match=r"^the second fails the parity probe: it shows the model no image at all"):
        await probe_parity(
            good,
            {"the first": good.generate, "the second": bad.generate},
            recipe=recipe,
            renderer=renderer,
            load_reference=lambda device: model,
        )
    assert good.num_requests == bad.num_requests
    assert set(good.forgotten) == {f"parity-probe:{case.name}" for case in parity_cases(recipe.agent, recipe.desktop)}


async def test_a_recipe_without_screenshots_or_with_little_context_is_probed_with_the_cases_that_fit(
    make_model: Make, renderer: Renderer
) -> None:
    model = make_model()
    for settings, num_requests in (("agent.show_screenshots=false", 1), ("agent.max_context_tokens=128", 1)):
        settings = ["agent.max_response_tokens=16", settings]
        engine = DefectiveEngine(model=model, renderer=renderer)
        report = await probe(engine, model, load_recipe("smoke", settings=settings), renderer)
        assert (engine.num_requests, report.num_tokens) == (num_requests, 8 * num_requests)


async def test_a_model_that_does_not_fit_on_the_accelerator_is_compared_on_the_cpu(
    make_model: Make, recipe: Recipe, renderer: Renderer
) -> None:
    model = make_model()
    devices: list[str | None] = []

    def load(device: str | None) -> Any:
        devices.append(device)
        if device is None:
            raise torch.OutOfMemoryError("no room")
        return model

    engine = DefectiveEngine(model=model, renderer=renderer)
    report = await probe_parity(engine, {"it": engine.generate}, recipe=recipe, renderer=renderer, load_reference=load)
    assert devices == [None, "cpu"]
    assert report.mean_diff < 1e-5
