"""A rollout session over HTTP is refused by name where a server samples something else than the checkpoint that it was
given, and is open in seconds where every server is well."""

import base64
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from defective_engine import DEFECTS, DefectiveEngine
from fake_policy_server import FakeSglang, serving

from osworld_pipeline.agent.adapters import Base, is_factor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.runs.embedded_server import EnvServers
from osworld_pipeline.runs.parity_probe import ParityReport
from osworld_pipeline.runs.rollout_session import probe_servers, rollout_session
from osworld_pipeline.training import lora
from osworld_pipeline.training.checkpoint import weights_digest
from osworld_pipeline.training.model import load_model


@dataclass(kw_only=True, eq=False)
class SamplingServer(FakeSglang):
    """Speaks sglang's /generate, and really samples, with the defect of its engine."""

    engine: DefectiveEngine
    num_sampled: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        if "token_ids_logprob" in body:
            return super()._generate(body)
        with self.lock:
            told = body["sampling_params"]
            result = self.engine.sample(
                GenerateRequest(
                    sampling=SamplingParams(
                        temperature=told["temperature"],
                        max_new_tokens=told["max_new_tokens"],
                        seed=told["sampling_seed"],
                    ),
                    token_ids=tuple(self._expand(body)),
                    images=tuple(base64.b64decode(image) for image in body.get("image_data", ())),
                )
            )
            self.num_sampled += 1
            self.reply = result.token_ids
            answer = super()._generate(body)
        sampled = zip(result.logprobs, result.token_ids, strict=True)
        answer["meta_info"]["output_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in sampled]
        return answer


class EnvServerWithoutDesktops(FakeSglang):
    def _truth(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        return {"episodes": 0} if path == "/health" else None


@dataclass(kw_only=True)
class Place:
    """Where sessions are opened: servers by the defects that they have, and an env server."""

    folder: Path
    state: StateDir
    processor: Any
    stack: ExitStack
    env: EnvServers

    def serve(self, defect: str = "", *, folder: Path | None = None, **options: Any) -> SamplingServer:
        renderer = Renderer(self.processor)
        model = load_model(folder or self.folder, is_frozen=True)
        engine = DefectiveEngine(model=model, renderer=renderer, defect=defect)
        server = SamplingServer(reply=(40,), image_id=renderer.image_id, engine=engine, **options)
        self.stack.enter_context(serving(server))
        return server

    async def open(self, recipe: Recipe, **options: Any) -> ParityReport | None:
        async with rollout_session(
            recipe=recipe, state=self.state, servers=self.env, purpose="p", processor=self.processor, **options
        ) as session:
            return session.parity


@pytest.fixture
def place(tiny_folder: Path, tmp_path: Path, processor: Any) -> Iterator[Place]:
    with ExitStack() as stack:
        env = stack.enter_context(serving(EnvServerWithoutDesktops(reply=(0,), image_id=0)))
        yield Place(
            folder=tiny_folder,
            state=StateDir(tmp_path / "state"),
            processor=processor,
            stack=stack,
            env=EnvServers(urls=(env.url,), token=None, num_replicas=1),
        )


def recipe_of(*servers: SamplingServer, **engine: Any) -> Recipe:
    fields = load_recipe("smoke", settings=["agent.max_pixels=40960"]).model_dump(mode="json")
    if servers:
        fields["engine"] |= {"kind": "sglang", "urls": [server.url for server in servers]}
    fields["engine"] |= engine
    return Recipe.model_validate(fields)


async def test_healthy_servers_are_each_probed_and_pass_within_seconds(place: Place) -> None:
    servers = [place.serve(), place.serve()]
    report = await place.open(recipe_of(*servers), folder=place.folder)
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
        await place.open(recipe_of(good, bad), folder=place.folder)
    assert f"the sglang server at {bad.url} fails the parity probe: it {DEFECTS[defect]}." in str(refused.value)


async def test_a_server_that_kept_its_weights_where_new_ones_were_loaded_is_refused(
    place: Place, tmp_path: Path
) -> None:
    """It answers that it has loaded them, and samples on from the old ones."""
    server = place.serve(folder=make_other(place.folder, tmp_path))
    with pytest.raises(EngineError, match="it samples from other weights than this checkpoint's"):
        await place.open(recipe_of(server), folder=place.folder)


async def test_an_adapter_is_compared_with_its_checkpoint_and_one_that_is_not_served_is_refused(
    place: Place, tmp_path: Path
) -> None:
    adapter = make_adapter(place.folder, tmp_path / "adapter-run")
    report = await place.open(recipe_of(place.serve(folder=adapter, lora=True)), folder=adapter)
    assert report is not None
    assert report.mean_diff < 1e-5
    with pytest.raises(EngineError, match="it samples from other weights than this checkpoint's"):
        await place.open(recipe_of(place.serve(lora=True)), folder=adapter)


async def test_a_recipe_may_leave_the_probe_out(place: Place) -> None:
    server = place.serve("blind")
    assert await place.open(recipe_of(server, parity_probe=False), folder=place.folder) is None
    assert await probe(place, recipe_of(server, parity_probe=False)) is None
    assert server.num_sampled == 0


async def test_servers_that_many_actors_share_are_probed_once_by_who_starts_them(place: Place) -> None:
    server = place.serve()
    report = await probe(place, recipe_of(server))
    num_sampled = server.num_sampled
    assert report is not None
    assert num_sampled
    loaded = (server.num_loads, server.label)
    assert await place.open(recipe_of(server), folder=place.folder, is_probed=True) is None
    assert server.num_sampled == num_sampled
    assert (server.num_loads, server.label) == loaded, "the sessions are of the run that loaded the weights"
    with pytest.raises(EngineError, match="it shows the model no image at all"):
        await probe(place, recipe_of(place.serve("blind")))


async def test_an_engine_in_process_is_probed_with_a_model_of_its_own_and_with_the_trainers(place: Place) -> None:
    model = load_model(place.folder, is_frozen=True)
    for options in ({"folder": place.folder}, {"model": model}):
        report = await place.open(recipe_of(), **options)
        assert report is not None
        assert report.mean_diff < 1e-5


async def test_an_engine_without_log_probabilities_is_not_probed(place: Place) -> None:
    server = place.serve()
    recipe = recipe_of(kind="openai", urls=[f"{server.url}/v1"], model="m")
    assert await place.open(recipe) is None


async def probe(place: Place, recipe: Recipe) -> ParityReport | None:
    return await probe_servers(
        recipe, place.folder, place.processor, state=place.state, run="p", policy_version=0, token=None
    )


def make_adapter(folder: Path, place: Path) -> Path:
    """A checkpoint that is an adapter over that one."""
    section, model = LoraSection(rank=2, alpha=8.0), load_model(folder)
    lora.add_adapters(model, section, seed=1)
    factors = {name: tensor + 0.3 for name, tensor in model.state_dict().items() if is_factor(name)}
    place.mkdir()
    base = Base(folder=folder, digest=weights_digest(folder))
    lora.save_adapter(place / "adapter", model, factors, section, base, place=place / "adapter")
    return place


def make_other(folder: Path, tmp_path: Path) -> Path:
    """The same checkpoint with other weights."""
    model = load_model(folder)
    for parameter in model.parameters():
        parameter.data.mul_(1.2)
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "other"
