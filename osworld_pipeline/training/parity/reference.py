"""A checkpoint's log-probabilities of an engine's samples: correct, and with a known server defect.

The pass is the trainer's: each image is encoded once, attention has no padding, logits only at sampled tokens.
Shapes: T tokens, N sampled tokens, I images, V vocabulary, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from osworld_pipeline.agent.logits import project_logits
from osworld_pipeline.agent.model_inputs import PixelCache, rope_positions
from osworld_pipeline.agent.parity_cases import ParitySample
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.training.objective.score import device_of
from osworld_pipeline.training.parity.defects import Defect


class ParityReference:
    def __init__(self, model: Any, renderer: Renderer) -> None:
        self._model = model
        self._renderer = renderer
        self._cache = PixelCache()
        vocab_size = model.config.text_config.vocab_size
        self._banned = torch.tensor(renderer.banned_ids(vocab_size), dtype=torch.long)

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def logits(self, sample: ParitySample) -> torch.Tensor:
        """(N, V) of the sampled tokens in float32 on the CPU, before temperature."""
        request = sample.request
        grids, pixels = self._encoded(request.images)
        positions_3T = self._positions(sample, grids)
        return self._forward(sample, positions_3T, pixels, grids)

    def logits_under(self, defect: Defect, sample: ParitySample) -> torch.Tensor | None:
        """The same for a server with a defect; None if the defect does not change this sample, or cannot occur because
        the prompt would have another number of tokens."""
        request = sample.request
        shown = defect.change_images(request.images)
        unseen = _unseen(defect, len(shown))
        own_grids, _ = self._encoded(request.images)
        grids, pixels = self._encoded(shown)
        if [int(grid.prod()) for grid in grids] != [int(grid.prod()) for grid in own_grids]:
            return None
        positions_3T = self._positions(sample, grids, as_text=unseen if defect.unseen_as == "text" else ())
        changed_3T = defect.change_positions(positions_3T, len(request.token_ids))
        if shown == request.images and not unseen and np.array_equal(positions_3T, changed_3T):
            return None
        return self._forward(sample, changed_3T, pixels, grids, unseen, as_zeros=defect.unseen_as == "zeros")

    def logprobs(
        self, sample: ParitySample, logits_NV: torch.Tensor, *, temperature: float, with_banned: bool = False
    ) -> np.ndarray:
        """Log-probabilities as defined in protocols.GenerateResult; `with_banned`: as if no id were banned."""
        scaled_NV = logits_NV / temperature
        if not with_banned:
            scaled_NV[:, self._banned] = -torch.inf
        targets_N1 = torch.tensor(sample.result.token_ids)[:, None]
        return torch.log_softmax(scaled_NV, dim=-1).gather(1, targets_N1)[:, 0].numpy()

    def _encoded(self, images: Sequence[bytes]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        encoded = [self._cache.pixel_values(self._renderer.processor, image) for image in images]
        return [grid for _, grid in encoded], [patches for patches, _ in encoded]

    def _positions(
        self, sample: ParitySample, grids: Sequence[np.ndarray], *, as_text: Sequence[int] = ()
    ) -> np.ndarray:
        """`as_text`: images whose placeholders are counted like text."""
        ids = np.asarray(_token_ids(sample), dtype=np.int64)
        edges = np.flatnonzero(np.diff(ids == self._renderer.image_id, prepend=False, append=False)).reshape(-1, 2)
        for index in as_text:
            ids[slice(*edges[index])] = self._renderer.im_start_id
        seen = [grid for index, grid in enumerate(grids) if index not in as_text]
        return rope_positions(self._renderer.processor, ids.tolist(), seen)

    @torch.inference_mode()
    def _forward(
        self,
        sample: ParitySample,
        positions_3T: np.ndarray,
        pixels: Sequence[np.ndarray],
        grids: Sequence[np.ndarray],
        unseen: Sequence[int] = (),
        *,
        as_zeros: bool = False,
    ) -> torch.Tensor:
        core, device = self._model.model, device_of(self._model)
        vision: dict[str, Any] = {}
        if pixels:
            features = core.get_image_features(
                torch.from_numpy(np.concatenate(pixels)).to(device),
                torch.from_numpy(np.stack(grids)).to(device),
                return_dict=True,
            )
            self._hide(features, unseen, as_zeros=as_zeros)
            vision = {"mm_encoder_outputs": {"image": features}}
        hidden_1TD = core(
            input_ids=torch.tensor([_token_ids(sample)], device=device),
            position_ids=torch.from_numpy(positions_3T[:, None]).to(device),
            use_cache=False,
            **vision,
        ).last_hidden_state
        # The hidden state before a token predicts it.
        return project_logits(self._model.lm_head, hidden_1TD[0, len(sample.request.token_ids) - 1 : -1]).float().cpu()

    def _hide(self, features: Any, unseen: Sequence[int], *, as_zeros: bool) -> None:
        placeholder_D = self._model.get_input_embeddings().weight[self._renderer.image_id]
        features.pooler_output = list(features.pooler_output)
        features.deepstack_features = [list(layer) for layer in features.deepstack_features]
        for index in unseen:
            own = features.pooler_output[index]
            features.pooler_output[index] = torch.zeros_like(own) if as_zeros else placeholder_D.expand_as(own)
            for layer in features.deepstack_features:
                layer[index] = torch.zeros_like(layer[index])


def _unseen(defect: Defect, num_images: int) -> Sequence[int]:
    return {"none": range(0), "later": range(1, num_images), "all": range(num_images)}[defect.unseen]


def _token_ids(sample: ParitySample) -> tuple[int, ...]:
    return (*sample.request.token_ids, *sample.result.token_ids)
