"""What a policy has before it when it answers: an episode as it grows, in the way that its context mode says.

A context makes the requests of an episode and keeps what came back, token by token, so that what is trained is what was
sampled.
"""

from typing import Protocol

from osworld_pipeline.agent.context_append import AppendContext
from osworld_pipeline.agent.context_chat import ChatContext
from osworld_pipeline.agent.context_window import WindowContext
from osworld_pipeline.agent.dialects import load_dialect
from osworld_pipeline.agent.images import ModelImage
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams, TokenSequence
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import AgentSection

__all__ = ["AppendContext", "ChatContext", "EpisodeContext", "WindowContext", "open_context"]


class EpisodeContext(Protocol):
    def add_observation(self, text: str, image: ModelImage) -> int | None:
        """What the prompt exceeds the limit by, a whole response counted in, where this observation does not fit:
        nothing is added then. None where it was added."""
        ...

    def request(self, sampling: SamplingParams, *, episode_id: str) -> GenerateRequest: ...

    def add_response(self, result: GenerateResult) -> None:
        """
        Raises:
            ValueError: ids and log-probabilities differ in number, there are none, or an image placeholder is among
                the ids.
        """
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Of the next request; 0 where there are no tokens."""
        ...

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """What has been sampled so far; a prompt that was never answered is in none of them."""
        ...


def open_context(
    agent: AgentSection,
    renderer: Renderer | None,
    system_prompt: str,
    *,
    max_new_tokens: int,
    uses_chat_api: bool = False,
) -> EpisodeContext:
    """The context that a recipe's agent asks for; `max_new_tokens` is what the sampling allows a response. An engine
    that takes turns needs no renderer."""
    dialect = load_dialect(agent.dialect, agent.coordinate_space)
    is_window = agent.context_mode == "window"
    if uses_chat_api:
        return ChatContext(
            system_prompt,
            dialect,
            num_screenshots=agent.window_screenshots if is_window else None,
            show_screenshots=agent.show_screenshots,
        )
    assert renderer is not None, "token ids need a renderer"
    if is_window:
        return WindowContext(
            renderer,
            system_prompt,
            dialect,
            num_screenshots=agent.window_screenshots,
            max_tokens=agent.max_context_tokens,
            max_new_tokens=max_new_tokens,
            show_screenshots=agent.show_screenshots,
        )
    return AppendContext(
        renderer,
        system_prompt,
        max_tokens=agent.max_context_tokens,
        max_new_tokens=max_new_tokens,
        show_screenshots=agent.show_screenshots,
    )
