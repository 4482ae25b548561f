"""A program with two engines on one sglang server, which sample all the time; the tests run two such programs at once.
Each line of its input, `VERSION CHECKPOINT`, names weights to switch to; the program answers once it has switched.

    python sglang_engines.py URL CHECKPOINT
"""

import asyncio
import itertools
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.rollout.engines.sglang_weights import vocab_size_of

NUM_ENGINES = 2


async def main(url: str, checkpoint: Path) -> None:
    renderer = Renderer(load_processor(checkpoint))
    section = EngineSection(kind="sglang", urls=(url,))
    vocab_size = vocab_size_of(checkpoint)
    answers: dict[int, int] = {}

    async def sample(engine: SglangEngine) -> None:
        for seed in itertools.count():
            request = GenerateRequest(
                sampling=SamplingParams(temperature=0.7, max_new_tokens=8, stop=(), seed=seed),
                token_ids=(*renderer.encode("Open the editor."), *renderer.generation_prompt),
            )
            result = await engine.generate(request)
            answers[result.policy_version] = answers.get(result.policy_version, 0) + 1

    async with AsyncExitStack() as stack:
        engines: list[SglangEngine] = []
        for _ in range(NUM_ENGINES):
            engine = SglangEngine(
                section.urls, renderer=renderer, section=section, vocab_size=vocab_size, owner="one run"
            )
            stack.push_async_callback(engine.close)
            engines.append(engine)
        samplers: list[asyncio.Task[None]] = []
        while line := await asyncio.to_thread(sys.stdin.readline):
            version, _, path = line.strip().partition(" ")
            await asyncio.gather(*(engine.load_weights(Path(path), policy_version=int(version)) for engine in engines))
            samplers = samplers or [asyncio.create_task(sample(engine)) for engine in engines]
            print(version, flush=True)
        failed = [sampler.exception() for sampler in samplers if sampler.done()]
        for sampler in samplers:
            sampler.cancel()
        await asyncio.gather(*samplers, return_exceptions=True)
        assert not failed, failed
    print(answers, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
