"""What a policy sees in each context mode, with and without screenshots; a demonstration is shown the same way."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from osworld_pipeline.agent.context import AppendContext, ChatContext, EpisodeContext, WindowContext, open_context
from osworld_pipeline.agent.demonstration import render_for_agent
from osworld_pipeline.agent.history import SeenTurn, opening_text
from osworld_pipeline.agent.images import ModelImage
from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.renderer import RenderedConversation, Renderer
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes.schema import AgentSection

Noise = Callable[[int, int, int], bytes]
SLIME = load_dialect("slime")
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=50)
TEXTS = [
    "[Domain hint]\nos\n[Task]\nRename alpha to bravo.\n[Accessibility Tree]\nfirst tree",
    "[Accessibility Tree]\nsecond tree\n[Last Action Result]\nok",
    "[Last Action Result]\nerror: no such window",
    "[Last Action Result]\nok",
]
WORDS = [
    SLIME.format("Click the folder", {"action": "left_click", "coordinate": [40, 20]}),
    SLIME.format("Press F2", {"action": "key", "keys": ["f2"]}),
    "I do not know.",
    SLIME.format("Done", {"action": "terminate", "status": "success"}),
]


@pytest.fixture
def pictures(noise_png: Noise) -> list[bytes]:
    return [noise_png(96, 64, seed) for seed in range(4)]


@pytest.fixture
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


def agent_of(**fields: Any) -> AgentSection:
    defaults = {"max_context_tokens": 4000, "max_response_tokens": 100, "system_prompt": "short", "max_pixels": 6144}
    return AgentSection(**{**defaults, **fields})


def opened(agent: AgentSection, renderer: Renderer | None, *, uses_chat_api: bool = False) -> EpisodeContext:
    dialect = load_dialect(agent.dialect, agent.coordinate_space)
    return open_context(
        agent,
        renderer,
        dialect.system_prompt(agent.system_prompt),
        max_new_tokens=agent.max_response_tokens,
        uses_chat_api=uses_chat_api,
    )


def model_image(data: bytes) -> ModelImage:
    return ModelImage(data=data, format="png", width=96, height=64, screen_width=96, screen_height=64, sha256="")


def play(
    context: EpisodeContext, renderer: Renderer | None, pictures: list[bytes], *, num_turns: int = 4
) -> list[GenerateRequest]:
    """The requests of an episode with TEXTS as observations and WORDS as responses."""
    requests = []
    for text, picture, words in list(zip(TEXTS, pictures, WORDS, strict=True))[:num_turns]:
        assert context.add_observation(text, model_image(picture)) is None
        requests.append(context.request(SAMPLING, episode_id="e"))
        ids = () if renderer is None else (*renderer.encode(words), renderer.im_end_id)
        context.add_response(
            GenerateResult(
                text=words, policy_version=5, finish_reason="stop", token_ids=ids, logprobs=(-0.5,) * len(ids)
            )
        )
    return requests


def demonstration(pictures: list[bytes]) -> list[dict[str, Any]]:
    turns = [(user_message(text), assistant_message(words)) for text, words in zip(TEXTS, WORDS, strict=True)]
    return [system_message("another prompt"), *(message for pair in turns for message in pair)]


def words_of(renderer: Renderer, token_ids: tuple[int, ...]) -> str:
    text = renderer.tokenizer.decode(token_ids)
    return text.replace("<|image_pad|>", "")


def test_a_window_over_the_whole_episode_shows_what_append_shows(renderer: Renderer, pictures: list[bytes]) -> None:
    window = play(opened(agent_of(context_mode="window", window_screenshots=9), renderer), renderer, pictures)
    append = play(opened(agent_of(), renderer), renderer, pictures)
    assert [(one.token_ids, one.images) for one in window] == [(one.token_ids, one.images) for one in append]


def test_a_window_keeps_the_task_and_lists_earlier_actions_as_text(renderer: Renderer, pictures: list[bytes]) -> None:
    context = opened(agent_of(context_mode="window", window_screenshots=2), renderer)
    last = play(context, renderer, pictures)[-1]
    assert last.images == tuple(pictures[2:])
    assert words_of(renderer, last.token_ids) == (
        "<|im_start|>system\n" + SLIME.system_prompt("short") + "<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|vision_end|>"
        "[Domain hint]\nos\n[Task]\nRename alpha to bravo.\n"
        "[Earlier Actions]\n1. Click the folder: left_click [40, 20] (ok)\n"
        '2. Press F2: key ["f2"] (error: no such window)\n'
        "[Last Action Result]\nerror: no such window<|im_end|>\n"
        "<|im_start|>assistant\nI do not know.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|vision_end|>[Last Action Result]\nok<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # No request extends another one, so no engine should keep anything.
    assert last.episode_id == ""


def test_each_answered_turn_of_a_window_is_a_sequence(renderer: Renderer, pictures: list[bytes]) -> None:
    context = opened(agent_of(context_mode="window", window_screenshots=2), renderer)
    requests = play(context, renderer, pictures)
    context.add_observation("never answered", model_image(pictures[0]))
    assert [sequence.image_steps for sequence in context.sequences] == [(0,), (0, 1), (1, 2), (2, 3)]
    for request, sequence, words in zip(requests, context.sequences, WORDS, strict=True):
        num_prompt = len(request.token_ids)
        assert sequence.token_ids[:num_prompt] == request.token_ids
        assert renderer.decode_response(sequence.token_ids[num_prompt:]) == words
        num_sampled = len(sequence.token_ids) - num_prompt
        assert sequence.response_mask == (0,) * num_prompt + (1,) * num_sampled
        assert sequence.sampled_logprobs == (0.0,) * num_prompt + (-0.5,) * num_sampled
        assert sequence.policy_versions == (-1,) * num_prompt + (5,) * num_sampled


def test_a_full_context_drops_old_screenshots_then_old_lines_and_never_the_newest_observation(
    renderer: Renderer, pictures: list[bytes]
) -> None:
    def last_prompt(max_tokens: int) -> GenerateRequest:
        section = agent_of(context_mode="window", window_screenshots=4, max_context_tokens=max_tokens)
        context = opened(section, renderer)
        return play(context, renderer, pictures)[-1]

    whole = len(last_prompt(4000).token_ids) + 100
    num_images, has_cut = [], []
    for limit in range(whole, 100, -10):
        try:
            prompt = last_prompt(limit)
        except AssertionError:
            break  # not even one earlier observation fits
        text = words_of(renderer, prompt.token_ids)
        assert len(prompt.token_ids) + 100 <= limit
        assert prompt.images[-1] == pictures[3]
        assert "[Task]\nRename alpha to bravo." in text
        assert text.endswith("[Last Action Result]\nok<|im_end|>\n<|im_start|>assistant\n")
        num_images.append(len(prompt.images))
        has_cut.append("earlier actions are left out)" in text)
    assert num_images == sorted(num_images, reverse=True)
    assert {4, 1} <= set(num_images)
    assert has_cut == sorted(has_cut)
    assert not any(cut and images > 1 for cut, images in zip(has_cut, num_images, strict=True))


def test_lines_that_do_not_fit_are_cut_from_the_oldest() -> None:
    turns = [SeenTurn(text=text, answer=words) for text, words in zip(TEXTS, WORDS, strict=True)]
    assert opening_text(turns, 3, SLIME, num_lines=1).split("\n")[4:] == [
        "[Earlier Actions]",
        "(2 earlier actions are left out)",
        "3. no action could be read (ok)",
        "[Last Action Result]",
        "ok",
    ]
    assert "(3 earlier actions are left out)\n[Last Action Result]" in opening_text(turns, 3, SLIME, num_lines=0)


@pytest.mark.parametrize("mode", ["append", "window"])
def test_an_observation_that_cannot_fit_returns_its_excess_and_changes_nothing(
    renderer: Renderer, pictures: list[bytes], mode: str
) -> None:
    context = opened(agent_of(context_mode=mode, max_context_tokens=400), renderer)
    play(context, renderer, pictures, num_turns=1)
    before = (context.sequences, context.num_prompt_tokens)
    excess = context.add_observation("word " * 2000, model_image(pictures[1]))
    assert excess is not None
    assert excess > 1000
    assert (context.sequences, context.num_prompt_tokens) == before


@pytest.mark.parametrize("mode", ["append", "window"])
def test_the_text_only_ablation_says_that_a_screenshot_was_left_out(
    renderer: Renderer, pictures: list[bytes], mode: str
) -> None:
    context = opened(agent_of(context_mode=mode, window_screenshots=2, show_screenshots=False), renderer)
    requests = play(context, renderer, pictures)
    assert all(request.images == () for request in requests)
    text = words_of(renderer, requests[-1].token_ids)
    assert "<|vision_start|>" not in text
    assert text.count("[Screenshot left out]\n") == 0
    assert text.count("[Screenshot left out]<|im_end|>") == (4 if mode == "append" else 2)
    assert all(sequence.image_steps == () for sequence in context.sequences)


@pytest.mark.parametrize("mode", ["append", "window"])
@pytest.mark.parametrize("show_screenshots", [True, False])
@pytest.mark.parametrize("max_tokens", [4000, 420])
def test_a_demonstration_is_rendered_like_an_episode_with_the_same_responses(
    renderer: Renderer, pictures: list[bytes], mode: str, show_screenshots: bool, max_tokens: int
) -> None:
    agent = agent_of(
        context_mode=mode, window_screenshots=2, show_screenshots=show_screenshots, max_context_tokens=max_tokens
    )
    context = opened(agent, renderer)
    try:
        play(context, renderer, pictures)
    except AssertionError:
        assert mode == "append", "a window of two turns fits"
    rendered = render_for_agent(renderer, demonstration(pictures), pictures, agent=agent, dialect="slime")
    assert len(rendered) == (1 if mode == "append" else 4)
    for sequence, part in zip(context.sequences, rendered, strict=True):
        num_tokens = len(sequence.token_ids)
        assert part.token_ids[:num_tokens] == sequence.token_ids
        assert part.mask[:num_tokens] == sequence.response_mask
        assert tuple(part.images)[: len(sequence.image_steps)] == tuple(pictures[step] for step in sequence.image_steps)
        if max_tokens == 4000:
            closing = () if mode == "window" else renderer.newline_ids
            assert part.token_ids[num_tokens:] == closing


def test_a_demonstration_of_another_dialect_is_rewritten(renderer: Renderer, noise_png: Noise) -> None:
    agent = agent_of(dialect="osgym", max_pixels=6144)
    messages = [
        system_message("s"),
        user_message("t"),
        assistant_message(SLIME.format("Click it", {"action": "left_click", "coordinate": [96, 64]})),
        user_message(""),
        assistant_message(SLIME.format("Scroll", {"action": "scroll", "direction": "down", "amount": 3})),
    ]
    (rendered,) = render_for_agent(
        renderer, messages, [noise_png(192, 128, 1), noise_png(192, 128, 2)], agent=agent, dialect="slime"
    )
    assert Image.open(io.BytesIO(rendered.images[0])).size == (96, 64)
    said = words_of(renderer, masked(rendered)).split("<|im_end|>")
    assert said == [
        "<|think_start|>Click it<|think_end|><|action_start|>click(500,500)<|action_end|>",
        # The scroll must name its point here: it is where the pointer was left.
        "<|think_start|>Scroll<|think_end|><|action_start|>scroll(500,500,-3)<|action_end|>",
        "",
    ]
    assert load_dialect("osgym").system_prompt("short") in words_of(renderer, rendered.token_ids)


def test_a_demonstration_that_the_dialect_cannot_express_is_refused(renderer: Renderer, pictures: list[bytes]) -> None:
    patient = [
        system_message("s"),
        user_message("t"),
        assistant_message(SLIME.format("Wait", {"action": "wait", "seconds": 30})),
    ]
    with pytest.raises(ValueError, match="cannot be expressed in the dialect sendkey: wait with these arguments"):
        render_for_agent(renderer, patient, pictures[:1], agent=agent_of(dialect="sendkey"), dialect="slime")
    with pytest.raises(ValueError, match="cannot be read in the dialect pyautogui"):
        render_for_agent(renderer, demonstration(pictures), pictures, agent=agent_of(), dialect="pyautogui")


def masked(rendered: RenderedConversation) -> tuple[int, ...]:
    return tuple(token for token, flag in zip(rendered.token_ids, rendered.mask, strict=True) if flag)


@pytest.mark.parametrize(("mode", "num_images"), [("append", 4), ("window", 2)])
def test_an_engine_with_a_chat_api_sees_the_same_turns(
    renderer: Renderer, pictures: list[bytes], mode: str, num_images: int
) -> None:
    agent = agent_of(context_mode=mode, window_screenshots=2)
    words = opened(agent, None, uses_chat_api=True)
    assert isinstance(words, ChatContext)
    last = play(words, None, pictures)[-1]
    ids = play(opened(agent, renderer), renderer, pictures)[-1]
    as_text = "".join(
        f"<|im_start|>{turn.role}\n{'<|vision_start|><|vision_end|>' * len(turn.images)}{turn.text}<|im_end|>\n"
        for turn in last.turns
    )
    assert f"{as_text}<|im_start|>assistant\n" == words_of(renderer, ids.token_ids)
    assert sum(len(turn.images) for turn in last.turns) == num_images
    assert (words.sequences, words.num_prompt_tokens, last.token_ids) == ((), 0, ())


def test_the_recipe_chooses_the_context(renderer: Renderer) -> None:
    assert isinstance(opened(agent_of(), renderer), AppendContext)
    assert isinstance(opened(agent_of(context_mode="window"), renderer), WindowContext)
