"""The reference of the probe is the forward pass of the model, and a defect changes only what it can affect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.parity_cases import ParitySample
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.training.parity.defects import DEFECTS
from osworld_pipeline.training.parity.reference import ParityReference

Noise = Callable[[int, int, int], bytes]
SAMPLED = (40, 41, 42, 43)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder).eval()


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


def sample_of(renderer: Renderer, images: list[bytes], sizes: list[tuple[int, int]]) -> ParitySample:
    ids = [token_id for width, height in sizes for token_id in renderer.image_ids(width=width, height=height)]
    request = GenerateRequest(
        sampling=SamplingParams(temperature=2.0),
        token_ids=(*renderer.encode("Look:"), *ids, *renderer.generation_prompt),
        images=tuple(images),
    )
    result = GenerateResult(text="", policy_version=0, finish_reason="length", token_ids=SAMPLED)
    return ParitySample(case="c", request=request, result=result)


def stock_logits(model: Any, processor: Any, sample: ParitySample) -> torch.Tensor:
    arrays = build_model_inputs(processor, [((*sample.request.token_ids, *SAMPLED), sample.request.images)])
    with torch.no_grad():
        logits_TV = model(**{name: torch.from_numpy(array) for name, array in arrays.items()}).logits[0]
    return logits_TV[-len(SAMPLED) - 1 : -1]


@pytest.mark.parametrize("sizes", [[], [(96, 64)], [(96, 64), (64, 128)]])
def test_log_probabilities_are_those_of_the_stock_model_after_temperature_without_banned_ids(
    sizes: list[tuple[int, int]], model: Any, renderer: Renderer, noise_png: Noise
) -> None:
    sample = sample_of(renderer, [noise_png(*size, seed) for seed, size in enumerate(sizes)], sizes)
    reference = ParityReference(model, renderer)
    logits_NV = reference.logits(sample)
    expected_NV = stock_logits(model, renderer.processor, sample)
    torch.testing.assert_close(logits_NV, expected_NV, atol=1e-5, rtol=1e-5)
    scaled_NV = expected_NV / 2.0
    raw = reference.logprobs(sample, logits_NV, temperature=2.0, with_banned=True)
    np.testing.assert_allclose(raw, picked(scaled_NV), atol=1e-5)
    scaled_NV[:, list(renderer.banned_ids(model.config.text_config.vocab_size))] = -torch.inf
    own = reference.logprobs(sample, logits_NV, temperature=2.0)
    np.testing.assert_allclose(own, picked(scaled_NV), atol=1e-5)
    assert (own > raw).all()


def picked(logits_NV: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits_NV, -1).gather(1, torch.tensor(SAMPLED)[:, None])[:, 0].numpy()


def test_a_defect_changes_only_the_samples_that_it_can_affect(model: Any, renderer: Renderer, noise_png: Noise) -> None:
    reference = ParityReference(model, renderer)
    text = sample_of(renderer, [], [])
    one = sample_of(renderer, [noise_png(96, 64, 1)], [(96, 64)])
    two = sample_of(renderer, [noise_png(96, 64, 1), noise_png(96, 64, 2)], [(96, 64)] * 2)
    unlike = sample_of(renderer, [noise_png(96, 64, 1), noise_png(64, 32, 2)], [(96, 64), (64, 32)])
    healthy = {id(sample): reference.logits(sample) for sample in (text, one, two, unlike)}
    touched = {defect: [] for defect in DEFECTS}
    for defect in DEFECTS:
        for sample in (text, one, two, unlike):
            logits_NV = reference.logits_under(defect, sample)
            touched[defect].append(logits_NV is not None)
            if logits_NV is not None:
                assert (logits_NV - healthy[id(sample)]).abs().max() > 1e-4, defect.name
    of_pairs = {"shows the first image in place of every later one", "exchanges the images of a request"}
    for defect, of_samples in touched.items():
        if defect.name in of_pairs:
            # Images of different sizes cannot replace each other: the prompt would be a different one.
            assert of_samples == [False, False, True, False], defect.name
        elif defect.unseen == "later":
            assert of_samples == [False, False, True, True], defect.name
        else:
            assert of_samples == [False, True, True, True], defect.name
