"""The context mode `append`: one episode as one growing sequence of tokens."""

from collections.abc import Sequence

from osworld_pipeline.agent.images import ModelImage
from osworld_pipeline.agent.observation_text import system_message, user_message, without_screenshot
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams, TokenSequence
from osworld_pipeline.protocols import GenerateRequest, GenerateResult


class AppendContext:
    """One episode as one growing sequence: turns are appended, earlier tokens never change."""

    def __init__(
        self,
        renderer: Renderer,
        system_prompt: str,
        *,
        max_tokens: int,
        max_new_tokens: int,
        show_screenshots: bool = True,
    ) -> None:
        self._renderer = renderer
        self._max_tokens = max_tokens
        self._max_new_tokens = max_new_tokens
        self._show_screenshots = show_screenshots
        self._token_ids: list[int] = renderer.turn(system_message(system_prompt))
        self._mask: list[int] = [0] * len(self._token_ids)
        self._logprobs: list[float] = [0.0] * len(self._token_ids)
        self._versions: list[int] = [-1] * len(self._token_ids)
        self._images: list[bytes] = []
        self._num_answered = 0
        """Number of tokens up to the end of the last response."""
        self._num_answered_images = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        if not self._num_answered:
            return ()
        end = self._num_answered
        return (
            TokenSequence(
                token_ids=tuple(self._token_ids[:end]),
                response_mask=tuple(self._mask[:end]),
                sampled_logprobs=tuple(self._logprobs[:end]),
                policy_versions=tuple(self._versions[:end]),
                image_steps=tuple(range(self._num_answered_images)),
            ),
        )

    def request(self, sampling: SamplingParams, *, episode_id: str) -> GenerateRequest:
        return GenerateRequest(
            sampling=sampling, token_ids=tuple(self._token_ids), images=tuple(self._images), episode_id=episode_id
        )

    def add_observation(self, text: str, image: ModelImage) -> int | None:
        ids = self._observation_ids(text, image)
        excess = len(self._token_ids) + len(ids) + self._max_new_tokens - self._max_tokens
        if excess > 0:
            return excess
        self._extend(ids, mask=0, logprobs=[0.0] * len(ids), versions=[-1] * len(ids))
        if self._show_screenshots:
            self._images.append(image.data)
        return None

    def add_response(self, result: GenerateResult) -> None:
        check_response(result, self._renderer)
        versions = result.policy_versions or (result.policy_version,) * len(result.token_ids)
        self._extend(result.token_ids, mask=1, logprobs=result.logprobs, versions=versions)
        self._num_answered = len(self._token_ids)
        self._num_answered_images = len(self._images)

    def _observation_ids(self, text: str, image: ModelImage) -> list[int]:
        """The end of the previous response, the user turn, and the opening of the assistant's turn."""
        ids: list[int] = []
        if self._mask[-1]:
            if self._token_ids[-1] != self._renderer.im_end_id:
                # Sampling stopped at a stop string; the closing token was not sampled, so it is outside the mask.
                ids.append(self._renderer.im_end_id)
            ids += self._renderer.newline_ids
        if self._show_screenshots:
            ids += self._renderer.turn(user_message(text), [(image.width, image.height)])
        else:
            ids += self._renderer.turn(user_message(without_screenshot(text), num_images=0))
        ids += self._renderer.generation_prompt
        return ids

    def _extend(
        self, token_ids: Sequence[int], *, mask: int, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self._token_ids += token_ids
        self._mask += [mask] * len(token_ids)
        self._logprobs += logprobs
        self._versions += versions


def check_response(result: GenerateResult, renderer: Renderer) -> None:
    """
    Raises:
        ValueError: as `EpisodeContext.add_response`.
    """
    ids, logprobs = result.token_ids, result.logprobs
    if not ids or len(ids) != len(logprobs):
        raise ValueError(f"the response has {len(ids)} tokens and {len(logprobs)} log-probabilities")
    if renderer.image_id in ids:
        raise ValueError("the response contains an image placeholder, for which there is no image")
