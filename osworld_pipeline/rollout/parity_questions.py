"""Runs the conversations of the parity probe on a policy engine, with requests like those of episodes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from osworld_pipeline.agent.context_append import AppendContext
from osworld_pipeline.agent.images import prepare_screenshot
from osworld_pipeline.agent.parity_cases import ParityCase, ParitySample
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.canary import Generate

Forget = Callable[[str], Awaitable[None]]
NUM_TOKENS = 8
"""Tokens sampled in each turn."""
PROMPT = "Operate the computer."
QUESTIONS = ("Where is the red target?", "And now?")
SEED = 20
MAX_PIXELS = 1 << 31
"""More than any screen has: the probe's screens are shown in the size in which they are drawn."""


async def ask_cases(
    generate: Generate,
    forget: Forget,
    cases: Sequence[ParityCase],
    renderer: Renderer,
    *,
    max_context_tokens: int,
) -> list[ParitySample]:
    """The engine's samples in each turn of each case; a turn that does not fit the context is omitted.

    Raises:
        EngineError: the engine does not answer, or answers without log-probabilities.
    """

    async def ask(case: ParityCase) -> list[ParitySample]:
        try:
            return await _ask(generate, case, renderer, max_context_tokens)
        finally:
            await forget(_episode_id(case))

    results = await asyncio.gather(*(ask(case) for case in cases), return_exceptions=True)
    samples: list[ParitySample] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        samples += result
    return samples


async def _ask(generate: Generate, case: ParityCase, renderer: Renderer, max_context_tokens: int) -> list[ParitySample]:
    context = AppendContext(
        renderer,
        PROMPT,
        max_tokens=max_context_tokens,
        max_new_tokens=NUM_TOKENS,
        show_screenshots=not case.is_text,
    )
    sampling = SamplingParams(temperature=case.temperature, max_new_tokens=NUM_TOKENS, stop=(), seed=SEED)
    samples: list[ParitySample] = []
    for turn, (question, screen) in enumerate(zip(QUESTIONS, case.screens, strict=False), start=1):
        image = await asyncio.to_thread(prepare_screenshot, screen, MAX_PIXELS)
        if context.add_observation(question, image) is not None:
            break
        request = context.request(sampling, episode_id=_episode_id(case))
        result = await generate(request)
        name = case.name if len(case.screens) == 1 else f"{case.name}, turn {turn}"
        samples.append(ParitySample(case=name, request=request, result=result))
        try:
            context.add_response(result)
        except ValueError as error:
            raise EngineError(f"the parity probe cannot use what the policy engine sampled: {error}") from error
    return samples


def _episode_id(case: ParityCase) -> str:
    return f"parity-probe:{case.name}"
