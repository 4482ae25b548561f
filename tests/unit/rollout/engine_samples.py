"""Requests for the in-process engine, and the log-probabilities of its answers in a plain forward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLForConditionalGeneration

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.observation_text import system_message, user_message
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.protocols import GenerateRequest, GenerateResult

Noise = Callable[[int, int, int], bytes]


def engine_model(tiny_folder: Path, *, scale: float = 4.0) -> Any:
    model = Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder).eval()
    # Fresh weights give nearly equal logits; larger ones make choices, and errors, visible.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


class Conversation:
    """An episode in `append` mode: each turn's prompt extends what was sampled before it."""

    def __init__(self, renderer: Renderer, noise_png: Noise, episode_id: str) -> None:
        self.episode_id = episode_id
        self._renderer = renderer
        self._noise_png = noise_png
        self._ids = renderer.turn(system_message(f"You operate the computer of {episode_id}."))
        self._images: list[bytes] = []

    def ask(self, text: str, size: tuple[int, int] = (64, 96), **sampling: Any) -> GenerateRequest:
        self._images.append(self._noise_png(*size, len(self._images) + sum(self.episode_id.encode())))
        self._ids += [*self._renderer.turn(user_message(text), [size]), *self._renderer.generation_prompt]
        options = {"temperature": 1.0, "max_new_tokens": 6, "seed": len(self._images), "stop": (), **sampling}
        return GenerateRequest(
            token_ids=tuple(self._ids),
            images=tuple(self._images),
            sampling=SamplingParams(**options),
            episode_id=self.episode_id,
        )

    def receive(self, result: GenerateResult) -> None:
        self._ids += [*result.token_ids, self._renderer.im_end_id, *self._renderer.newline_ids]


def largest_difference(model: Any, processor: Any, request: GenerateRequest, result: GenerateResult) -> float:
    """Largest difference of the reported log-probabilities from a plain forward pass over the whole sequence."""
    recomputed = plain_logprobs(model, processor, request, result)
    return max(abs(mine - its) for mine, its in zip(recomputed, result.logprobs, strict=True))


def plain_logprobs(model: Any, processor: Any, request: GenerateRequest, result: GenerateResult) -> list[float]:
    inputs = build_model_inputs(processor, [((*request.token_ids, *result.token_ids), request.images)])
    with torch.no_grad():
        logits_TV = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).logits[0]
    logits_TV[:, list(Renderer(processor).banned_ids(logits_TV.shape[-1]))] = -torch.inf
    logprobs_TV = torch.log_softmax(logits_TV / (request.sampling.temperature or 1.0), dim=-1)
    start = len(request.token_ids) - 1
    return [float(logprobs_TV[start + index, token]) for index, token in enumerate(result.token_ids)]
