"""Renders a recorded demonstration in the form of a recipe's agent: its dialect, image size, system prompt and context
mode, so that the training data has the form of rollouts."""

from collections.abc import Mapping, Sequence
from typing import Any

from osworld_pipeline.agent.context_window import Picture, WindowContext
from osworld_pipeline.agent.fit_demonstration import fit_demonstration
from osworld_pipeline.agent.observation_text import system_message, without_screenshot
from osworld_pipeline.agent.renderer import RenderedConversation, Renderer, image_size, render_demonstration
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.protocols import GenerateResult
from osworld_pipeline.recipes.schema import AgentSection

Messages = Sequence[Mapping[str, Any]]


def render_for_agent(
    renderer: Renderer, messages: Messages, images: Sequence[bytes], *, agent: AgentSection, dialect: str
) -> list[RenderedConversation]:
    """One conversation in `append` mode, one per response in `window` mode. `dialect`: the `Dialect.name` in which the
    turns are written. Turns from the first one that does not fit the context are omitted.

    Raises:
        ValueError: images and placeholders disagree, a turn cannot be expressed in the agent's dialect, or not even the
            first response fits.
    """
    target = load_dialect(agent.dialect, agent.coordinate_space)
    messages, images = fit_demonstration(
        messages, images, dialect=load_dialect(dialect), target=target, max_pixels=agent.max_pixels
    )
    prompt = system_message(target.system_prompt(agent.system_prompt))
    messages = [prompt, *(message for message in messages if message["role"] != "system")]
    if agent.context_mode == "window":
        context = WindowContext(
            renderer,
            prompt["content"][0]["text"],
            target,
            num_screenshots=agent.window_screenshots,
            max_tokens=agent.max_context_tokens,
            max_new_tokens=agent.max_response_tokens,
            show_screenshots=agent.show_screenshots,
        )
        return render_demonstration_windows(context, renderer, messages, images, max_tokens=agent.max_context_tokens)
    if not agent.show_screenshots:
        messages, images = [_without_images(message) for message in messages], []
    return [render_demonstration(renderer, messages, images, max_tokens=agent.max_context_tokens)]


def render_demonstration_windows(
    context: WindowContext, renderer: Renderer, messages: Messages, images: Sequence[bytes], *, max_tokens: int
) -> list[RenderedConversation]:
    """Replays the demonstration through the context, with the same code and layout as rollouts. Its system turn is the
    context's.

    Raises:
        ValueError: not even the first response fits.
    """
    shown: list[Sequence[Picture]] = []
    waiting_text: list[str] = []
    waiting_images: list[Picture] = []
    num_images = 0
    for message in messages:
        text = _text(message)
        if message["role"] == "user":
            count = sum(part["type"] == "image" for part in message["content"])
            data = images[num_images : num_images + count]
            num_images += count
            waiting_images += [(image, image_size(image)) for image in data]
            waiting_text += [text] if text else []
        elif message["role"] == "assistant":
            if not _play(context, renderer, "\n".join(waiting_text), waiting_images, text, max_tokens):
                break
            shown.append(waiting_images)
            waiting_text, waiting_images = [], []
    if not context.sequences:
        raise ValueError(f"no response of the conversation ends within {max_tokens} tokens")
    return [
        RenderedConversation(
            token_ids=sequence.token_ids,
            mask=sequence.response_mask,
            images=tuple(data for step in dict.fromkeys(sequence.image_steps) for data, _ in shown[step]),
            num_assistant_turns=1,
        )
        for sequence in context.sequences
    ]


def _play(
    context: WindowContext, renderer: Renderer, text: str, pictures: list[Picture], answer: str, max_tokens: int
) -> bool:
    """Returns False if the turn does not fit."""
    ids = (*renderer.encode(answer), renderer.im_end_id)
    if context.add_pictures(text, pictures) is not None or context.num_prompt_tokens + len(ids) > max_tokens:
        return False
    result = GenerateResult(
        text=answer, policy_version=0, finish_reason="stop", token_ids=ids, logprobs=(0.0,) * len(ids)
    )
    context.add_response(result)
    return True


def _text(message: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def _without_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A user turn for the text-only ablation; other turns are unchanged."""
    if message["role"] != "user":
        return message
    return {"role": "user", "content": [{"type": "text", "text": without_screenshot(_text(message))}]}
