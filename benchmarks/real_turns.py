"""Conversations of a desktop in the layout of training: fixed demonstrations, and episodes that an
engine samples turn by turn."""

import functools
import io
import random
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

from osworld_pipeline.agent.images import prepare_screenshot
from osworld_pipeline.agent.observation_text import assistant_message, system_message, user_message
from osworld_pipeline.agent.renderer import Renderer, image_size, render_demonstration
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.protocols import GenerateRequest, PolicyEngine

SCREEN = (1280, 720)
MAX_PIXELS = 1_003_520
"""The default of agent.max_pixels."""
TASK = "[Task]\nRename the folder alpha to bravo {0}.\n[Accessibility Tree]\npush-button\tSave\t(412, 88)\t(64, 28)"
WORDS = "Click the button that saves the file, because the dialog is still open and nothing was written so far"


@functools.lru_cache(maxsize=512)
def screen(seed: int, size: tuple[int, int] = SCREEN) -> bytes:
    """A picture of windows with text, different for each seed, as shown to a model."""
    rng = random.Random(seed)
    image = Image.new("RGB", size, (40, 70 + seed % 100, 110))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        left, top = rng.randrange(size[0] * 3 // 4), rng.randrange(size[1] * 3 // 4)
        right, bottom = left + size[0] // 3, top + size[1] // 3
        draw.rectangle((left, top, right, bottom), fill=(235, 235, 240), outline=(90, 90, 90))
        draw.rectangle((left, top, right, top + 18), fill=(60, 90, rng.randrange(256)))
        for line in range(top + 24, bottom - 12, 14):
            draw.text((left + 6, line), f"{rng.getrandbits(64):x} {WORDS[: rng.randrange(40)]}", fill=(20, 20, 20))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return prepare_screenshot(buffer.getvalue(), MAX_PIXELS).data


def system_prompt(kind: str = "full") -> str:
    return load_dialect("slime").system_prompt(kind)


def demonstration(
    renderer: Renderer,
    name: str,
    images: Sequence[bytes],
    *,
    num_words: int = 12,
    advantage: float = 1.0,
    prompt: str = "full",
) -> Trajectory:
    """One turn for each image. `num_words`: words of the response before its action. `prompt`: full or short."""
    rng = random.Random(name)
    messages = [system_message(system_prompt(prompt))]
    for turn in range(len(images)):
        said = " ".join(rng.choices(WORDS.split(), k=num_words))
        action = {"action": "left_click", "coordinate": [rng.randrange(1280), rng.randrange(704)]}
        messages.append(user_message(TASK.format(name) if turn == 0 else ""))
        messages.append(assistant_message(load_dialect("slime").format(said, action)))
    rendered = render_demonstration(renderer, messages, images)
    return Trajectory(
        trajectory_id=name,
        task_id=name,
        token_ids=rendered.token_ids,
        response_mask=rendered.mask,
        images=rendered.images,
        advantage=advantage,
    )


def demonstration_of(
    renderer: Renderer, name: str, num_tokens: int, *, size: tuple[int, int] = SCREEN, advantage: float = 1.0
) -> Trajectory:
    """A demonstration with as many turns as fit into `num_tokens`, with a different picture in each; text fills the
    rest.

    Raises:
        ValueError: one turn does not fit.
    """
    first = demonstration(renderer, name, [screen(0, size)])
    later = len(demonstration(renderer, name, [screen(0, size)] * 2).token_ids) - len(first.token_ids)
    # Responses differ by a few tokens; half a turn's slack is filled below.
    num_turns = 1 + max(0, (num_tokens - len(first.token_ids) - 64) // (later + 32))
    offset = sum(map(ord, name)) * 1000
    whole = demonstration(
        renderer, name, [screen(offset + turn, size) for turn in range(num_turns)], advantage=advantage
    )
    num_missing = num_tokens - len(whole.token_ids)
    if num_missing < 0:
        raise ValueError(f"a turn of {len(first.token_ids)} tokens does not fit into {num_tokens}")
    rng = random.Random(name)
    filler = tuple(rng.choices(renderer.encode(WORDS), k=num_missing))
    # After the start of the system turn, so that the prompt grows and the responses do not change.
    return Trajectory(
        trajectory_id=name,
        task_id=name,
        token_ids=(*whole.token_ids[:3], *filler, *whole.token_ids[3:]),
        response_mask=(0,) * num_missing + whole.response_mask,
        images=whole.images,
        advantage=advantage,
    )


async def sampled_episode(
    engine: PolicyEngine,
    renderer: Renderer,
    name: str,
    images: Sequence[bytes],
    *,
    max_new_tokens: int,
    advantage: float,
    keeps_turns: bool = True,
    prompt: str = "full",
) -> Trajectory:
    """One turn for each image, in `append` mode, at temperature 1. `keeps_turns`: whether the engine may keep keys and
    values between them."""
    ids: list[int] = renderer.turn(system_message(system_prompt(prompt)))
    mask, logprobs, versions = [0] * len(ids), [0.0] * len(ids), [-1] * len(ids)

    def add(more: Sequence[int]) -> None:
        ids.extend(more)
        mask.extend([0] * len(more))
        logprobs.extend([0.0] * len(more))
        versions.extend([-1] * len(more))

    for turn, image in enumerate(images):
        add(renderer.turn(user_message(TASK.format(name) if turn == 0 else ""), [image_size(image)]))
        add(renderer.generation_prompt)
        seed = random.Random(f"{name}:{turn}").getrandbits(31)
        request = GenerateRequest(
            token_ids=tuple(ids),
            images=tuple(images[: turn + 1]),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=seed),
            episode_id=name if keeps_turns else "",
        )
        result = await engine.generate(request)
        ids += result.token_ids
        mask += [1] * len(result.token_ids)
        logprobs += result.logprobs
        versions += result.policy_versions or [result.policy_version] * len(result.token_ids)
        closing = () if ids[-1] == renderer.im_end_id else (renderer.im_end_id,)
        add((*closing, *renderer.newline_ids))
    await engine.forget(name)
    return Trajectory(
        trajectory_id=name,
        task_id=name,
        token_ids=tuple(ids),
        response_mask=tuple(mask),
        images=tuple(images),
        sampled_logprobs=tuple(logprobs),
        policy_versions=tuple(versions),
        advantage=advantage,
    )


def image_patches(processor: Any, trajectories: Sequence[Trajectory]) -> list[int]:
    """Number of patches of each image of the trajectories, for `Architecture.update_flops`."""
    return [
        int(processor.image_processor.get_number_of_image_patches(height, width, {}))
        for trajectory in trajectories
        for width, height in map(image_size, trajectory.images)
    ]
