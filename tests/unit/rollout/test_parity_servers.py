"""A rollout session over HTTP is refused with the name of any server that does not sample from its given checkpoint,
and opens within seconds if every server is healthy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from defective_engine import DEFECTS
from sampling_servers import Place, make_adapter, make_other, open_place, recipe_of

from osworld_pipeline.errors import EngineError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.runs.parity.probe import ParityReport
from osworld_pipeline.runs.rollouts.session import served_weights
from osworld_pipeline.training.model import load_model


@pytest.fixture
def place(tiny_folder: Path, tmp_path: Path, processor: Any) -> Iterator[Place]:
    with open_place(tiny_folder, tmp_path / "state", processor) as opened:
        yield opened


async def open_session(place: Place, recipe: Recipe, **options: Any) -> ParityReport | None:
    async with place.session(recipe, **options) as session:
        return session.parity


async def test_healthy_servers_are_each_probed_and_pass_within_seconds(place: Place) -> None:
    servers = [place.serve(), place.serve()]
    report = await open_session(place, recipe_of(*servers), folder=place.folder)
    assert report is not None
    assert report.mean_diff < 1e-5
    assert report.metrics() == {
        "parity_mean_diff": report.mean_diff,
        "parity_max_diff": report.max_diff,
        "parity_s": report.seconds,
    }
    assert [server.num_sampled for server in servers] == [report.num_tokens // 16] * 2


@pytest.mark.parametrize("defect", ["flat rows", "forgets images", "exchanged images", "rescaled", "raw logits"])
async def test_a_session_with_a_defective_server_never_opens_and_the_defect_is_named(defect: str, place: Place) -> None:
    good, bad = place.serve(), place.serve(defect)
    with pytest.raises(EngineError) as refused:
        await open_session(place, recipe_of(good, bad), folder=place.folder)
    assert f"the sglang server at {bad.url} fails the parity probe: it {DEFECTS[defect]}." in str(refused.value)


async def test_a_server_that_kept_its_weights_when_new_ones_were_loaded_is_refused(
    place: Place, tmp_path: Path
) -> None:
    """It answers that it has loaded the new weights, and continues to sample from the old ones."""
    server = place.serve(folder=make_other(place.folder, tmp_path))
    with pytest.raises(EngineError, match="it samples from other weights than this checkpoint's"):
        await open_session(place, recipe_of(server), folder=place.folder)


async def test_an_adapter_is_compared_with_its_checkpoint_and_one_that_is_not_served_is_refused(
    place: Place, tmp_path: Path
) -> None:
    adapter = make_adapter(place.folder, tmp_path / "adapter-run")
    report = await open_session(place, recipe_of(place.serve(folder=adapter, lora=True)), folder=adapter)
    assert report is not None
    assert report.mean_diff < 1e-5
    with pytest.raises(EngineError, match="it samples from other weights than this checkpoint's"):
        await open_session(place, recipe_of(place.serve(lora=True)), folder=adapter)


async def test_a_recipe_may_disable_the_probe(place: Place) -> None:
    server = place.serve("blind")
    assert await open_session(place, recipe_of(server, parity_probe=False), folder=place.folder) is None
    assert await probe(place, recipe_of(server, parity_probe=False)) is None
    assert server.num_sampled == 0


async def test_servers_that_many_actors_share_are_probed_once_by_the_program_that_starts_them(place: Place) -> None:
    server = place.serve()
    report = await probe(place, recipe_of(server))
    num_sampled = server.num_sampled
    assert report is not None
    assert num_sampled
    loaded = (server.num_loads, server.label)
    assert await open_session(place, recipe_of(server), folder=place.folder, is_probed=True) is None
    assert server.num_sampled == num_sampled
    assert (server.num_loads, server.label) == loaded, "the sessions are of the run that loaded the weights"
    with pytest.raises(EngineError, match="it shows the model no image at all"):
        await probe(place, recipe_of(place.serve("blind")))


async def test_an_in_process_engine_is_probed_with_its_own_model_and_with_the_trainers_model(place: Place) -> None:
    model = load_model(place.folder, is_frozen=True)
    for options in ({"folder": place.folder}, {"model": model}):
        report = await open_session(place, recipe_of(), **options)
        assert report is not None
        assert report.mean_diff < 1e-5


async def test_an_engine_without_log_probabilities_is_not_probed(place: Place) -> None:
    server = place.serve()
    recipe = recipe_of(kind="openai", urls=[f"{server.url}/v1"], model="m")
    assert await open_session(place, recipe) is None


async def probe(place: Place, recipe: Recipe) -> ParityReport | None:
    async with served_weights(
        recipe, place.folder, place.processor, state=place.state, run="p", policy_version=0, token=None
    ) as served:
        return served.parity
