"""Samples the rows of many episodes together, one token each per step; rows join and leave between steps.

A prompt is processed alone, so its result does not depend on other rows. Rows then decode together, at least MIN_ROWS
of them and over a multiple of KV_MULTIPLE positions: a CPU then computes each row bit-identically in any batch.

Shapes: B running rows, Q tokens to be read, K visible tokens, N images, V vocabulary.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from osworld_pipeline.agent.logits import project_logits
from osworld_pipeline.agent.model_inputs import rope_positions
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.engines.transformers_cache import (
    KV_MULTIPLE,
    DecodeView,
    FeatureCache,
    ImageFeatures,
    KeptEpisode,
    KeptEpisodes,
    KvSlots,
    PrefillView,
)
from osworld_pipeline.rollout.engines.transformers_choice import StopCheck, choose_tokens

MIN_ROWS = 4
"""A matrix product with fewer rows uses another kernel of a CPU's library, and rounds differently."""
FEATURE_BYTES = 256 << 20
FAULTS = (RuntimeError, ValueError, IndexError, MemoryError)


@dataclass(kw_only=True, eq=False)
class Row:
    """One request in progress."""

    request: GenerateRequest
    future: "Future[GenerateResult]"
    """Cancelled by a caller that no longer waits."""
    grids: tuple[np.ndarray, ...]
    pixels: list[np.ndarray | None]
    """Patches of each image; None if already processed, in the episode's last turn or by this row."""
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    next_position: int = 0
    finish_reason: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Result of one call of `advance`."""

    done: list[tuple[Row, GenerateResult | EngineError]]
    unprepared: list[Row]
    """Rows that must be read from their beginning and lack the pixels of their first images."""


class Sampler:
    """A sampler for one thread. `kept` is shared with the thread that prepares requests."""

    def __init__(
        self,
        model: Any,
        renderer: Renderer,
        *,
        device: torch.device,
        policy_version: int,
        max_batch: int,
        kept: KeptEpisodes | None,
    ) -> None:
        self.policy_version = policy_version
        self._model = model
        self._renderer = renderer
        self._device = device
        self._max_batch = max_batch
        self._kept = kept
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        """Rows in slot order. The newest token of each is not in its slot yet."""
        self._slots = KvSlots(model.config.text_config, device=device, dtype=model.dtype)
        self._features = FeatureCache(max_bytes=FEATURE_BYTES)
        self._stop_check = StopCheck(renderer)
        self._eos_ids = frozenset({renderer.im_end_id, renderer.tokenizer.pad_token_id})
        self._banned_V = self._banned_ids()
        self._progress = Progress(done=[], unprepared=[])

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, row: Row) -> None:
        self._waiting.append(row)

    def forget_weights(self, *, policy_version: int) -> None:
        """The weights have changed: no cached result of the old ones is used again. Running responses continue with the
        new weights, after their prompts have been processed again."""
        self.policy_version = policy_version
        self._release()
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()

    def advance(self) -> Progress:
        """Reads waiting prompts as far as there is room, and samples one token of each running row."""
        self._progress = Progress(done=[], unprepared=[])
        with self._evaluating(), torch.inference_mode():
            for row in [row for row in self._running if row.future.cancelled()]:
                self._leave(row)
            while self._waiting and len(self._running) < self._max_batch:
                row = self._waiting.popleft()
                if not row.future.cancelled():
                    self._admit(row)
            if self._running:
                self._decode()
        return self._progress

    def fail_all(self, error: EngineError) -> Progress:
        progress = Progress(done=[(row, error) for row in (*self._running, *self._waiting)], unprepared=[])
        self._running.clear()
        self._waiting.clear()
        return progress

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A trainer's own model returns to training mode before the result is returned."""
        was_training = self._model.training
        if was_training:
            self._model.eval()
        try:
            yield
        finally:
            if was_training:
                self._model.train()

    def _admit(self, row: Row) -> None:
        try:
            logits_1V = self._read_prompt(row)
        except torch.OutOfMemoryError:
            # The cache for later turns is optional.
            self._release()
            try:
                logits_1V = self._read_prompt(row)
            except FAULTS as error:
                self._progress.done.append((row, generation_error(error)))
                return
        except FAULTS as error:
            self._progress.done.append((row, generation_error(error)))
            return
        if logits_1V is None:
            self._progress.unprepared.append(row)
            return
        self._running.append(row)
        self._extend([row], logits_1V)

    def _read_prompt(self, row: Row) -> torch.Tensor | None:
        """Logits of the token after the current tokens of the row; None if pixels are missing."""
        slot = len(self._running)
        token_ids = (*row.request.token_ids, *row.token_ids)
        kept = self._kept.find(row.request) if self._kept is not None and row.request.episode_id else None
        start, first_image = (len(kept.token_ids), len(kept.images)) if kept is not None else (0, 0)
        images = row.request.images
        if any(
            row.pixels[index] is None and images[index] not in self._features
            for index in range(first_image, len(images))
        ):
            return None
        self._reserve(row)
        if kept is not None:
            self._slots.copy_in(slot, kept.keys, kept.values)
        positions_3T = rope_positions(self._renderer.processor, token_ids, row.grids)
        row.next_position = int(positions_3T.max()) + 1
        ids_1Q = torch.tensor([token_ids[start:]], device=self._device)
        embeddings_1QD = self._model.get_input_embeddings()(ids_1Q)
        vision: dict[str, Any] = {}
        if first_image < len(images):
            mask_1Q = ids_1Q == self._model.config.image_token_id
            features = [self._image_features(row, index) for index in range(first_image, len(images))]
            embeddings_1QD[mask_1Q] = torch.cat([each.embeddings for each in features]).to(embeddings_1QD.dtype)
            layers = zip(*(each.deepstack for each in features), strict=True)
            vision = {
                "visual_pos_masks": mask_1Q,
                "deepstack_visual_embeds": [torch.cat(layer) for layer in layers],
            }
        hidden_1QD = self._model.model.language_model(
            inputs_embeds=embeddings_1QD,
            position_ids=torch.from_numpy(positions_3T[:, None, start:]).to(self._device),
            attention_mask=self._prefill_mask(start, len(token_ids)),
            past_key_values=PrefillView(self._slots, slot, start),
            use_cache=True,
            **vision,
        ).last_hidden_state
        row.pixels = [None] * len(row.pixels)
        return project_logits(self._model.lm_head, hidden_1QD[:, -1])

    def _prefill_mask(self, start: int, end: int) -> torch.Tensor | None:
        """(1, 1, Q, K); None from position 0, where attention is causal."""
        if not start:
            return None
        places = torch.arange(end, device=self._device)
        return self._additive(places[None, :] <= places[start:, None])[None, None]

    def _additive(self, is_seen: torch.Tensor) -> torch.Tensor:
        """An additive mask, which attention would otherwise compute from a Boolean mask in every layer."""
        mask = torch.zeros(is_seen.shape, dtype=self._model.dtype, device=self._device)
        return mask.masked_fill_(~is_seen, -torch.inf)

    def _image_features(self, row: Row, index: int) -> ImageFeatures:
        """Encodes each image alone, so that its features do not depend on other images."""

        def compute() -> ImageFeatures:
            patches = row.pixels[index]
            assert patches is not None, "a row is admitted once its pixels are there"
            outputs = self._model.model.get_image_features(
                torch.from_numpy(patches).to(self._device),
                torch.from_numpy(row.grids[index])[None].to(self._device),
                return_dict=True,
            )
            return ImageFeatures(
                embeddings=outputs.pooler_output[0], deepstack=tuple(layer[0] for layer in outputs.deepstack_features)
            )

        return self._features.get(row.request.images[index], compute)

    def _decode(self) -> None:
        rows = self._running
        num_rows = max(MIN_ROWS, len(rows))
        spare = num_rows - len(rows)
        lengths_B = torch.tensor([row.num_tokens - 1 for row in rows] + [0] * spare, device=self._device)
        positions_B = torch.tensor([row.next_position for row in rows] + [0] * spare, device=self._device)
        ids_B1 = torch.tensor([[row.token_ids[-1]] for row in rows] + [[0]] * spare, device=self._device)
        num_places = -(-max(row.num_tokens for row in rows) // KV_MULTIPLE) * KV_MULTIPLE
        mask_BK = self._additive(torch.arange(num_places, device=self._device) <= lengths_B[:, None])
        try:
            hidden_B1D = self._model.model.language_model(
                inputs_embeds=self._model.get_input_embeddings()(ids_B1),
                position_ids=positions_B[None, :, None].expand(3, -1, -1),
                attention_mask=mask_BK[:, None, None],
                past_key_values=DecodeView(self._slots, lengths_B, num_places),
                use_cache=True,
            ).last_hidden_state
            logits_BV = project_logits(self._model.lm_head, hidden_B1D[:, 0])[: len(rows)]
        except FAULTS as error:
            self._progress.done.extend((row, generation_error(error)) for row in rows)
            self._running = []
            return
        for row in rows:
            row.next_position += 1
        self._extend(list(rows), logits_BV)

    def _extend(self, rows: Sequence[Row], logits_BV: torch.Tensor) -> None:
        samplings = [row.request.sampling for row in rows]
        chances = [float(torch.rand((), generator=row.generator, dtype=torch.float32)) for row in rows]
        next_B, logprobs_B = choose_tokens(logits_BV, samplings, chances, self._banned_V)
        for row, token_id, logprob in zip(rows, next_B, logprobs_B, strict=True):
            row.token_ids.append(token_id)
            row.logprobs.append(logprob)
            row.versions.append(self.policy_version)
            if token_id in self._eos_ids or self._stop_check.is_complete(row.token_ids, row.request.sampling.stop):
                row.finish_reason = "stop"
            elif len(row.token_ids) >= row.request.sampling.max_new_tokens:
                row.finish_reason = "length"
            if row.finish_reason:
                self._finish(row)

    def _finish(self, row: Row) -> None:
        request = row.request
        if self._kept is not None and request.episode_id:
            keys, values = self._slots.copy_out(self._running.index(row), row.num_tokens - 1)
            kept = KeptEpisode(
                token_ids=(*request.token_ids, *row.token_ids[:-1]),
                images=request.images,
                grids=row.grids,
                keys=keys,
                values=values,
            )
            self._kept.put(request.episode_id, kept)
        self._leave(row)
        is_mixed = len(set(row.versions)) > 1
        result = GenerateResult(
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            text=self._renderer.decode_response(row.token_ids),
            policy_version=row.versions[0],
            policy_versions=tuple(row.versions) if is_mixed else (),
            finish_reason=row.finish_reason,
        )
        self._progress.done.append((row, result))

    def _leave(self, row: Row) -> None:
        """The last row moves to the slot that becomes free."""
        slot, last = self._running.index(row), len(self._running) - 1
        if slot != last:
            mover = self._running[slot] = self._running[last]
            self._slots.move(source=last, target=slot, num_tokens=mover.num_tokens)
        self._running.pop()

    def _reserve(self, row: Row) -> None:
        num_slots = max(MIN_ROWS, 1 << len(self._running).bit_length())
        num_tokens = len(row.request.token_ids) + row.request.sampling.max_new_tokens
        self._slots.reserve(
            num_slots=min(num_slots, max(MIN_ROWS, self._max_batch)), num_tokens=max(num_tokens, KV_MULTIPLE)
        )

    def _release(self) -> None:
        """Frees everything that can be recomputed; running rows keep their slots."""
        if self._kept is not None:
            self._kept.clear()
        self._features.clear()
        if not self._running:
            self._slots.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _banned_ids(self) -> torch.Tensor:
        vocab_size = self._model.config.text_config.vocab_size
        banned_V = torch.zeros(vocab_size, dtype=torch.bool)
        banned_V[list(self._renderer.banned_ids(vocab_size))] = True
        return banned_V.to(self._device)


def generation_error(error: BaseException) -> EngineError:
    return EngineError(f"generation failed: {(str(error).splitlines() or [type(error).__name__])[0]}")
