"""The context mode `window`: each turn is a separate sequence.

    system
    user      <screenshot of the window's first turn> task, [Earlier Actions] one per line, that turn's own text
    assistant its response, as sampled
    user      <screenshot> text
    ...       up to the newest turn, and the opening of the assistant's

While the window reaches back to the first turn, the prompt equals that of `append`. Near the token limit the oldest
turns leave the window first and become lines, then the oldest lines are omitted and marked; the newest observation is
always kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from osworld_pipeline.agent.context_append import check_response
from osworld_pipeline.agent.history import SeenTurn, opening_text
from osworld_pipeline.agent.images import ModelImage
from osworld_pipeline.agent.observation_text import system_message, user_message, without_screenshot
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import Dialect
from osworld_pipeline.dialects.coordinates import Size
from osworld_pipeline.domain.episode import SamplingParams, TokenSequence
from osworld_pipeline.protocols import GenerateRequest, GenerateResult

Picture = tuple[bytes, Size]
"""An encoded image and its size."""


@dataclass(frozen=True, kw_only=True)
class _Turn(SeenTurn):
    pictures: tuple[Picture, ...]
    ids: tuple[int, ...]
    """Tokens of the user turn if it is not the first of a window."""
    answer_ids: tuple[int, ...] = ()
    """Tokens of the response in later prompts: the sampled ones, closed."""


class WindowContext:
    """Keeps all turns; every request shows the last of them."""

    def __init__(
        self,
        renderer: Renderer,
        system_prompt: str,
        dialect: Dialect,
        *,
        num_screenshots: int,
        max_tokens: int,
        max_new_tokens: int,
        show_screenshots: bool = True,
    ) -> None:
        self._renderer = renderer
        self._dialect = dialect
        self._num_screenshots = num_screenshots
        self._max_prompt = max_tokens - max_new_tokens
        self._show_screenshots = show_screenshots
        self._system = tuple(renderer.turn(system_message(system_prompt)))
        self._turns: list[_Turn] = []
        self._first = 0
        """The first turn of the newest prompt."""
        self._prompt: list[int] = []
        self._sequences: list[TokenSequence] = []

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        return tuple(self._sequences)

    def request(self, sampling: SamplingParams, *, episode_id: str) -> GenerateRequest:
        # Without the episode's id: a request does not extend the previous one, so its cache must not be kept.
        images = (image for turn in self._turns[self._first :] for image, _ in turn.pictures)
        return GenerateRequest(sampling=sampling, token_ids=tuple(self._prompt), images=tuple(images))

    def add_observation(self, text: str, image: ModelImage) -> int | None:
        return self.add_pictures(text, [(image.data, (image.width, image.height))])

    def add_pictures(self, text: str, pictures: Sequence[Picture]) -> int | None:
        """Does the same as add_observation, for a recorded turn with any number of images."""
        assert not self._turns or self._turns[-1].answer is not None, "an observation follows an answer"
        if not self._show_screenshots:
            text, pictures = without_screenshot(text), ()
        turn = _Turn(text=text, pictures=tuple(pictures), ids=())
        turn = replace(turn, ids=tuple(self._user_ids(turn, text)))
        turns = [*self._turns, turn]
        first, prompt = self._fit(turns)
        if len(prompt) > self._max_prompt:
            return len(prompt) - self._max_prompt
        self._turns, self._first, self._prompt = turns, first, prompt
        return None

    def add_response(self, result: GenerateResult) -> None:
        check_response(result, self._renderer)
        versions = result.policy_versions or (result.policy_version,) * len(result.token_ids)
        num_prompt = len(self._prompt)
        steps = (step for step in range(self._first, len(self._turns)) for _ in range(len(self._turns[step].pictures)))
        self._sequences.append(
            TokenSequence(
                token_ids=(*self._prompt, *result.token_ids),
                response_mask=(0,) * num_prompt + (1,) * len(result.token_ids),
                sampled_logprobs=(0.0,) * num_prompt + tuple(result.logprobs),
                policy_versions=(-1,) * num_prompt + tuple(versions),
                image_steps=tuple(steps),
            )
        )
        closing = () if result.token_ids[-1] == self._renderer.im_end_id else (self._renderer.im_end_id,)
        ids = (*result.token_ids, *closing, *self._renderer.newline_ids)
        self._turns[-1] = replace(self._turns[-1], answer=result.text, answer_ids=ids)

    def _fit(self, turns: Sequence[_Turn]) -> tuple[int, list[int]]:
        """The first turn of the longest window that fits, and its prompt; if none fits, the shortest possible
        prompt."""
        newest = len(turns) - 1
        prompt: list[int] = []
        for first in range(max(0, newest + 1 - self._num_screenshots), newest + 1):
            prompt = self._render(turns, first)
            if len(prompt) <= self._max_prompt:
                return first, prompt
        for num_lines in range(newest - 1, -1, -1):
            prompt = self._render(turns, newest, num_lines=num_lines)
            if len(prompt) <= self._max_prompt:
                break
        return newest, prompt

    def _render(self, turns: Sequence[_Turn], first: int, *, num_lines: int | None = None) -> list[int]:
        text = opening_text(turns, first, self._dialect, num_lines=num_lines)
        ids = [*self._system, *self._user_ids(turns[first], text)]
        for before, turn in zip(turns[first:], turns[first + 1 :], strict=False):
            ids += [*self._renderer.generation_prompt, *before.answer_ids, *turn.ids]
        return [*ids, *self._renderer.generation_prompt]

    def _user_ids(self, turn: _Turn, text: str) -> list[int]:
        sizes = [size for _, size in turn.pictures]
        return self._renderer.turn(user_message(text, num_images=len(sizes)), sizes)
