"""A policy engine that really samples, token by token with the stock model and its key-value cache, and has one of the
defects that policy servers have had. It shares no code with the probe's own reference."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import DynamicCache

from osworld_pipeline.agent.model_inputs import PixelCache, build_model_inputs
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.protocols import GenerateRequest, GenerateResult

Features = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
DEFECTS = {
    "flat rows": "drops the height and width rows of M-RoPE",
    "exchanged rows": "exchanges the height and width rows of M-RoPE",
    "one by one": "counts image tokens one by one, without M-RoPE",
    "no offset": "gives sampled tokens positions without M-RoPE's offset",
    "forgets images": "drops every image after the first turn",
    "blind": "shows the model no image at all",
    "repeats the first": "shows the first image in place of every later one",
    "exchanged images": "exchanges the images of a request",
    "rescaled": "rescales images before the model sees them",
    "reversed channels": "exchanges the red and blue channels of images",
    "raw logits": "reports log-probabilities before temperature",
    "another temperature": "reports log-probabilities at 0.7 times the temperature that was asked for",
    "nothing banned": "gives probability to ids that are never sampled",
}
"""Of the engine, and what the probe calls it."""


@dataclass(kw_only=True, eq=False)
class DefectiveEngine:
    model: Any
    renderer: Renderer
    defect: str = ""
    keeps_features: bool = False
    """What the vision tower made of an image outlives a change of weights."""
    name: str = "stub"
    uses_chat_api: bool = False
    policy_version: int = 0
    num_requests: int = 0
    forgotten: list[str] = field(default_factory=list)
    _cache: PixelCache = field(default_factory=PixelCache)
    _kept: dict[bytes, Features] = field(default_factory=dict)

    def change_weights(self, model: Any) -> None:
        self.model = model
        if not self.keeps_features:
            self._kept.clear()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.num_requests += 1
        return self.sample(request)

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        raise AssertionError("a test changes the weights")

    async def forget(self, episode_id: str) -> None:
        self.forgotten.append(episode_id)

    async def health(self) -> None: ...

    async def close(self) -> None: ...

    @torch.no_grad()
    def sample(self, request: GenerateRequest) -> GenerateResult:
        sampling = request.sampling
        generator = torch.Generator().manual_seed(sampling.seed)
        ids: list[int] = []
        logprobs: list[float] = []
        seen = () if self.defect == "blind" else tuple(self._features(one) for one in self._shown(request.images))
        cache = DynamicCache()
        while len(ids) < sampling.max_new_tokens and self.renderer.im_end_id not in ids:
            logits_V = self._next_logits(request, ids, seen, cache)
            allowed_V = self._logprobs(logits_V, sampling.temperature, is_banned=True)
            ids.append(int(torch.multinomial(allowed_V.exp(), 1, generator=generator)))
            logprobs.append(float(self._reported(logits_V, sampling.temperature)[ids[-1]]))
        return GenerateResult(
            text=self.renderer.decode_response(ids),
            policy_version=self.policy_version,
            finish_reason="length",
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
        )

    @torch.no_grad()
    def score(self, request: GenerateRequest, token_id: int) -> float:
        """The log-probability that the engine would report if it had sampled this token first."""
        seen = () if self.defect == "blind" else tuple(self._features(one) for one in self._shown(request.images))
        logits_V = self._next_logits(request, (), seen, DynamicCache())
        return float(self._reported(logits_V, request.sampling.temperature)[token_id])

    def _reported(self, logits_V: torch.Tensor, temperature: float) -> torch.Tensor:
        factor = {"raw logits": 1 / temperature, "another temperature": 0.7}.get(self.defect, 1.0)
        return self._logprobs(logits_V, temperature * factor, is_banned=self.defect != "nothing banned")

    def _logprobs(self, logits_V: torch.Tensor, temperature: float, *, is_banned: bool) -> torch.Tensor:
        scaled_V = logits_V.float() / temperature
        if is_banned:
            scaled_V[list(self.renderer.banned_ids(len(scaled_V)))] = -torch.inf
        return scaled_V.log_softmax(-1)

    def _next_logits(
        self, request: GenerateRequest, sampled: Sequence[int], seen: Sequence[Features], cache: DynamicCache
    ) -> torch.Tensor:
        """`cache` holds the tokens of earlier calls and receives the others."""
        core = self.model.model
        token_ids = (*request.token_ids, *sampled)
        arrays = build_model_inputs(self.renderer.processor, [(token_ids, request.images)], cache=self._cache)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        num_cached = cache.get_seq_length()
        input_ids = inputs["input_ids"][:, num_cached:]
        embeddings = self.model.get_input_embeddings()(input_ids)
        vision: dict[str, Any] = {}
        if seen and num_cached == 0:
            is_image_T = input_ids[0] == self.renderer.image_id
            # Placeholders for which no features are left stay unchanged.
            is_seen_T = is_image_T & (is_image_T.cumsum(0) <= sum(len(main) for main, _ in seen))
            embeddings[0, is_seen_T] = torch.cat([main for main, _ in seen]).to(embeddings.dtype)
            layers = zip(*(deep for _, deep in seen), strict=True)
            vision = {
                "visual_pos_masks": is_seen_T[None],
                "deepstack_visual_embeds": [torch.cat(layer) for layer in layers],
            }
        hidden_1TD = core.language_model(
            inputs_embeds=embeddings,
            position_ids=self._positions(inputs, len(request.token_ids))[:, :, num_cached:],
            past_key_values=cache,
            use_cache=True,
            **vision,
        ).last_hidden_state
        return self.model.lm_head(hidden_1TD[0, -1])

    def _positions(self, inputs: Mapping[str, torch.Tensor], num_prompt: int) -> torch.Tensor:
        grid = inputs.get("image_grid_thw")
        positions_31T, _ = self.model.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=grid
        )
        in_turn_T = torch.arange(positions_31T.shape[-1])
        if self.defect == "flat rows":
            return positions_31T[:1].repeat(3, 1, 1)
        if self.defect == "exchanged rows":
            return positions_31T[[0, 2, 1]]
        if self.defect == "one by one":
            return in_turn_T.expand(3, 1, -1)
        if self.defect == "no offset":
            positions_31T = positions_31T.clone()
            positions_31T[:, :, num_prompt:] = in_turn_T[num_prompt:]
        return positions_31T

    def _shown(self, images: Sequence[bytes]) -> Sequence[bytes]:
        if self.defect == "forgets images":
            return images[:1]
        sizes = {_decode(image).size for image in images}
        if self.defect == "repeats the first" and len(sizes) == 1:
            return [images[0]] * len(images)
        if self.defect == "exchanged images" and len(sizes) == 1:
            return images[::-1]
        if self.defect == "rescaled":
            return [_encode(_halved(_decode(image))) for image in images]
        if self.defect == "reversed channels":
            return [_encode(Image.merge("RGB", _decode(image).split()[::-1])) for image in images]
        return images

    def _features(self, image: bytes) -> Features:
        if image in self._kept:
            return self._kept[image]
        outputs = self.renderer.processor.image_processor(images=[_decode(image)], return_tensors="pt")
        made = self.model.model.get_image_features(outputs["pixel_values"], outputs["image_grid_thw"], return_dict=True)
        self._kept[image] = made.pooler_output[0], tuple(layer[0] for layer in made.deepstack_features)
        return self._kept[image]


def _halved(image: Image.Image) -> Image.Image:
    """Halves the image and scales it back, with another filter than the one by which the probe imitates this."""
    small = image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS)
    return small.resize(image.size, Image.Resampling.BICUBIC)


def _decode(image: bytes) -> Image.Image:
    with Image.open(io.BytesIO(image)) as opened:
        return opened.convert("RGB")


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
