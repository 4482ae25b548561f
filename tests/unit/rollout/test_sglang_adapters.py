"""LoRA on sglang servers: the base's weights are loaded once, and each adapter under its own name."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_samples import Start, engine_of, fake_servers, text_request, write_adapter, write_checkpoint

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.sglang_weights import read_weights


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base")


@pytest.fixture
def adapters(tmp_path: Path, base: Path) -> list[Path]:
    return [write_adapter(tmp_path / f"adapter-{factors}", base, factors=factors) for factors in range(4)]


@pytest.fixture
def start(renderer: Renderer, base: Path) -> Iterator[Start]:
    with fake_servers(renderer, model_path=str(base), lora=True) as make:
        yield make


def name_of(adapter: Path) -> str:
    named = read_weights(adapter, policy_version=0).adapter
    assert named is not None
    return named.name


async def test_an_adapter_is_served_over_its_base_and_not_merged(
    renderer: Renderer, start: Start, base: Path, adapters: list[Path]
) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        for version, adapter in enumerate(adapters[:2], start=1):
            await engine.load_weights(adapter, policy_version=version)
            result = await engine.generate(text_request(renderer))
            assert result.policy_version == version
            assert fake.requests("/generate")[-1]["lora_path"] == name_of(adapter)
    assert [body["model_path"] for body in fake.requests("/update_weights_from_disk")] == [str(base)]
    assert fake.adapters[name_of(adapters[0])] == str(adapters[0] / "adapter")


async def test_old_adapters_are_unloaded(renderer: Renderer, start: Start, adapters: list[Path]) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        for version, adapter in enumerate(adapters, start=1):
            await engine.load_weights(adapter, policy_version=version)
    assert set(fake.adapters) == {name_of(adapter) for adapter in adapters[-2:]}


async def test_engines_share_an_adapter(renderer: Renderer, start: Start, adapters: list[Path]) -> None:
    fake = start()
    async with engine_of(renderer, fake, owner="run") as one, engine_of(renderer, fake, owner="run") as other:
        await asyncio.gather(*(engine.load_weights(adapters[0], policy_version=1) for engine in (one, other)))
        assert fake.num_loads == 1
        await one.load_weights(adapters[1], policy_version=2)
        # It has not received the next adapter: the previous one stays loaded.
        assert (await other.generate(text_request(renderer))).policy_version == 1
        assert (await one.generate(text_request(renderer))).policy_version == 2
    assert fake.num_loads == 1


async def test_a_server_that_has_lost_an_adapter_is_given_it_again(
    renderer: Renderer, start: Start, adapters: list[Path]
) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        await engine.load_weights(adapters[0], policy_version=3)
        fake.adapters.clear()
        assert (await engine.generate(text_request(renderer))).policy_version == 3
    assert fake.paths().count("/load_lora_adapter") == 2


async def test_a_server_without_lora_is_refused_with_its_missing_arguments(
    renderer: Renderer, start: Start, adapters: list[Path]
) -> None:
    async with engine_of(renderer, start(lora=False)) as engine:
        with pytest.raises(EngineError, match=r"LoRA is not enabled.*must run with --enable-lora"):
            await engine.load_weights(adapters[0], policy_version=1)


async def test_the_base_itself_is_sampled_without_an_adapter(
    renderer: Renderer, start: Start, base: Path, adapters: list[Path]
) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        await engine.load_weights(adapters[0], policy_version=1)
        await engine.load_weights(base, policy_version=0)
        assert (await engine.generate(text_request(renderer))).policy_version == 0
    assert "lora_path" not in fake.requests("/generate")[-1]
    assert fake.num_loads == 1
