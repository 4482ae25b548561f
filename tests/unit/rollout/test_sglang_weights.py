import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_policy_server import Answer
from sglang_samples import REPLY, Start, engine_of, fake_servers, text_request, write_checkpoint

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines.sglang_weights import Label, weights_digest


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture
def start(renderer: Renderer, checkpoint: Path) -> Iterator[Start]:
    """Servers that were started on the checkpoint."""
    with fake_servers(renderer, model_path=str(checkpoint)) as make:
        yield make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints" / "one")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another set of weights with the same vision tower."""
    return write_checkpoint(tmp_path / "checkpoints" / "two", words=1)


@pytest.fixture
def other_tower(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints" / "three", tower=1)


async def test_every_server_is_paused_while_it_loads_weights(
    renderer: Renderer, start: Start, checkpoint: Path
) -> None:
    fakes = [start(), start()]
    async with engine_of(renderer, *fakes) as engine:
        await engine.load_weights(checkpoint, policy_version=3)
        assert engine.policy_version == 3
        result = await engine.generate(text_request(renderer))
    assert result.policy_version == 3
    for fake in fakes:
        control = [path for path in fake.paths() if "generat" in path or "update" in path]
        control = [path for path in control if path != "/generate"]
        assert control[-3:] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert fake.requests("/pause_generation") == [{"mode": "retract"}]
        update = fake.requests("/update_weights_from_disk")[0]
        assert update["model_path"] == str(checkpoint)
        assert weights_digest(checkpoint) in update["weight_version"]
    assert fakes[0].label == fakes[1].label


async def test_a_server_that_fails_an_update_is_not_sampled_from_until_it_has_the_weights(
    renderer: Renderer, start: Start, checkpoint: Path
) -> None:
    good, bad = start(), start(reply=(50,))
    async with engine_of(renderer, good, bad) as engine:
        bad.instead["/update_weights_from_disk"] = [
            Answer(status=400, body=b'{"success": false, "message": "no space left"}')
        ]
        await engine.load_weights(checkpoint, policy_version=4)
        assert bad.paths().count("/continue_generation") == 1
        assert bad.label == "default"
        seen = [await engine.generate(text_request(renderer)) for _ in range(4)]
        assert {result.token_ids for result in seen} == {REPLY}
        await asyncio.sleep(1.1)
        later = [await engine.generate(text_request(renderer)) for _ in range(20)]
    assert bad.label == good.label
    assert {result.token_ids for result in later} == {REPLY, (50,)}
    assert {result.policy_version for result in later} == {4}


async def test_the_engine_keeps_the_old_weights_if_no_server_loads_the_new_ones(
    renderer: Renderer, start: Start, checkpoint: Path, other: Path
) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        await engine.load_weights(checkpoint, policy_version=1)
        fake.instead["/update_weights_from_disk"] = [Answer(status=400, body=b'{"success": false, "message": "torn"}')]
        with pytest.raises(EngineError, match=r"were not loaded: .*torn"):
            await engine.load_weights(other, policy_version=2)
        assert engine.policy_version == 1
        assert (await engine.generate(text_request(renderer))).policy_version == 1


async def test_a_restarted_server_gets_the_current_weights(renderer: Renderer, start: Start, checkpoint: Path) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        await engine.load_weights(checkpoint, policy_version=6)
        fake.label, fake.model_path = "default", str(checkpoint)
        fake.sessions.clear()
        fake.instead["/generate"] = [Answer(is_dropped=True)]
        result = await engine.generate(text_request(renderer))
    assert result.policy_version == 6
    assert fake.num_loads == 2


async def test_a_response_from_unknown_weights_is_never_used(renderer: Renderer, start: Start) -> None:
    fake = start()
    async with engine_of(renderer, fake, retry_budget_s=0.3) as engine:
        await engine.health()
        await engine.generate(text_request(renderer))
        fake.knows_label = False
        with pytest.raises(EngineError, match="weights that this engine has not received"):
            await engine.generate(text_request(renderer))


async def test_each_token_says_which_weights_sampled_it(
    renderer: Renderer, start: Start, checkpoint: Path, other: Path
) -> None:
    fake = start()
    async with engine_of(renderer, fake) as engine:
        await engine.load_weights(checkpoint, policy_version=1)
        first = fake.label
        await engine.load_weights(other, policy_version=2)
        fake.spans = ((first, 0, 2), (fake.label, 2, 3))
        result = await engine.generate(text_request(renderer))
    assert result.policy_version == 1
    assert result.policy_versions == (1, 1, 2)


async def test_a_server_paused_for_an_update_continues_when_the_update_is_cancelled(
    renderer: Renderer, start: Start, checkpoint: Path
) -> None:
    fake = start()
    fake.instead["/update_weights_from_disk"] = [Answer(is_silent=True)]
    async with engine_of(renderer, fake) as engine:
        task = asyncio.create_task(engine.load_weights(checkpoint, policy_version=1))
        await asyncio.to_thread(fake.wait_for, "/update_weights_from_disk")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not fake.is_paused
        assert not fake.sessions, "the lock must be released"


async def test_servers_with_different_weights_are_not_sampled_together(renderer: Renderer, start: Start) -> None:
    fakes = [start(), start(label="other")]
    async with engine_of(renderer, *fakes) as engine:
        await engine.health()
        results = [await engine.generate(text_request(renderer)) for _ in range(8)]
    assert {result.policy_version for result in results} == {0}
    used = [fake for fake in fakes if any("token_ids_logprob" not in body for body in fake.requests("/generate"))]
    assert len(used) == 1


async def test_health_refuses_servers_of_different_models(renderer: Renderer, start: Start) -> None:
    async with engine_of(renderer, start(), start(model_type="llava")) as engine:
        with pytest.raises(EngineError, match="serves another model"):
            await engine.health()


async def test_health_refuses_log_probabilities_that_ignore_the_temperature(renderer: Renderer, start: Start) -> None:
    async with engine_of(renderer, start(ignores_temperature=True)) as engine:
        with pytest.raises(EngineError, match="start it without SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
            await engine.health()


async def test_health_waits_for_a_server_that_is_coming_up(renderer: Renderer, start: Start) -> None:
    fake = start()
    fake.instead["/model_info"] = [Answer(status=503)] * 2
    async with engine_of(renderer, fake) as engine:
        await engine.health()
    assert fake.paths().count("/model_info") == 3


async def test_a_server_that_keeps_stale_images_is_refused_where_the_vision_tower_changes(
    renderer: Renderer, start: Start, checkpoint: Path, other_tower: Path
) -> None:
    fake = start(keeps_stale_images=True)
    async with engine_of(renderer, fake) as engine:
        await engine.load_weights(checkpoint, policy_version=1)
        with pytest.raises(
            EngineError, match=r"another vision tower than the weights before.*SGLANG_VLM_CACHE_SIZE_MB=0"
        ):
            await engine.load_weights(other_tower, policy_version=2)
        assert Label.parse(fake.label).weights == weights_digest(checkpoint)
        assert (await engine.generate(text_request(renderer))).policy_version == 1
    assert {folder.name for folder in checkpoint.parent.iterdir()} == {"one", "three"}


async def test_a_server_of_another_model_is_checked_for_stale_images_at_the_first_load(
    renderer: Renderer, start: Start, checkpoint: Path
) -> None:
    fake = start(keeps_stale_images=True, model_path="some/model")
    async with engine_of(renderer, fake) as engine:
        with pytest.raises(EngineError, match="SGLANG_VLM_CACHE_SIZE_MB=0"):
            await engine.load_weights(checkpoint, policy_version=1)


async def test_a_server_without_stale_images_is_checked_once_for_all_engines(
    renderer: Renderer, start: Start, checkpoint: Path, other_tower: Path
) -> None:
    fake = start()
    for path, num_loads in ((checkpoint, 1), (other_tower, 1 + 2), (checkpoint, 1 + 2 + 1)):
        async with engine_of(renderer, fake) as engine:
            await engine.load_weights(path, policy_version=1)
        assert fake.num_loads == num_loads


async def test_a_frozen_vision_tower_needs_no_check(
    renderer: Renderer, start: Start, checkpoint: Path, other: Path
) -> None:
    fake = start(keeps_stale_images=True)
    async with engine_of(renderer, fake) as engine:
        await engine.load_weights(checkpoint, policy_version=1)
        await engine.load_weights(other, policy_version=2)
    assert fake.num_loads == 2


async def test_the_servers_behind_a_router_are_used_directly(
    renderer: Renderer, start: Start, checkpoint: Path
) -> None:
    workers = [start(), start()]
    router = start(workers=tuple(worker.url for worker in workers))
    async with engine_of(renderer, router) as engine:
        await engine.health()
        await engine.load_weights(checkpoint, policy_version=1)
    assert router.paths() == ["/workers"]
    assert [worker.num_loads for worker in workers] == [1, 1]
