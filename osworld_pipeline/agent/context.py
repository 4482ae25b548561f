"""The prompt of a policy: an episode's observations and responses, in the layout of its context mode.

A context builds the requests of an episode and records the responses token by token, so that training uses exactly the
sampled tokens.
"""

from typing import Protocol

from osworld_pipeline.agent.context_append import AppendContext
from osworld_pipeline.agent.context_chat import ChatContext
from osworld_pipeline.agent.context_window import WindowContext
from osworld_pipeline.agent.images import ModelImage
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import SamplingParams, TokenSequence
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import AgentSection

__all__ = ["AppendContext", "ChatContext", "EpisodeContext", "WindowContext", "open_context"]


class EpisodeContext(Protocol):
    def add_observation(self, text: str, image: ModelImage) -> int | None:
        """Returns None if the observation was added. If it does not fit together with a full response, returns the
        excess in tokens and adds nothing."""
        ...

    def request(self, sampling: SamplingParams, *, episode_id: str) -> GenerateRequest: ...

    def add_response(self, result: GenerateResult) -> None:
        """
        Raises:
            ValueError: the numbers of ids and log-probabilities differ or are 0, or the ids contain an image
                placeholder.
        """
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the next prompt; 0 if it has no tokens."""
        ...

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The sampled sequences so far; a prompt without a response is not included."""
        ...


def open_context(
    agent: AgentSection,
    renderer: Renderer | None,
    system_prompt: str,
    *,
    max_new_tokens: int,
    uses_chat_api: bool = False,
) -> EpisodeContext:
    """The context that a recipe's agent selects; `max_new_tokens`: the sampling limit of a response. A chat engine
    needs no renderer."""
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
