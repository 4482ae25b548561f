"""Contexts as chat messages, for engines that return text: the same layouts as `append` and `window`.

Tokens cannot be counted here: the endpoint decides how much fits, and a conversation that it refuses ends with its
error. The responses cannot be trained on.
"""

from osworld_pipeline.agent.history import SeenTurn, opening_text
from osworld_pipeline.agent.images import ModelImage
from osworld_pipeline.agent.observation_text import without_screenshot
from osworld_pipeline.dialects import Dialect
from osworld_pipeline.domain.episode import SamplingParams, TokenSequence
from osworld_pipeline.protocols import ChatTurn, GenerateRequest, GenerateResult


class ChatContext:
    """An episode as chat turns."""

    def __init__(
        self, system_prompt: str, dialect: Dialect, *, num_screenshots: int | None, show_screenshots: bool = True
    ) -> None:
        """`num_screenshots`: of a window; None shows the whole episode."""
        self._system = ChatTurn(role="system", text=system_prompt)
        self._dialect = dialect
        self._num_screenshots = num_screenshots
        self._show_screenshots = show_screenshots
        self._turns: list[SeenTurn] = []
        self._images: list[tuple[bytes, ...]] = []

    @property
    def num_prompt_tokens(self) -> int:
        return 0

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        return ()

    def request(self, sampling: SamplingParams, *, episode_id: str) -> GenerateRequest:
        first = 0 if self._num_screenshots is None else max(0, len(self._turns) - self._num_screenshots)
        turns = [self._system]
        for index in range(first, len(self._turns)):
            turn = self._turns[index]
            text = opening_text(self._turns, first, self._dialect) if index == first else turn.text
            turns.append(ChatTurn(role="user", text=text, images=self._images[index]))
            if turn.answer is not None:
                turns.append(ChatTurn(role="assistant", text=turn.answer))
        return GenerateRequest(sampling=sampling, turns=tuple(turns), episode_id=episode_id)

    def add_observation(self, text: str, image: ModelImage) -> int | None:
        self._turns.append(SeenTurn(text=text if self._show_screenshots else without_screenshot(text)))
        self._images.append((image.data,) if self._show_screenshots else ())
        return None

    def add_response(self, result: GenerateResult) -> None:
        self._turns[-1] = SeenTurn(text=self._turns[-1].text, answer=result.text)
