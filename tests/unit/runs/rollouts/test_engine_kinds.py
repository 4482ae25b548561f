"""Engines of other distributions: found by their entry points, probed like ours, and named if they are broken."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from painted_desktops import painted_server
from pydantic import SecretStr, ValidationError

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DependencyError, EngineError
from osworld_pipeline.recipes import Recipe, engine_names, load_recipe
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.runs.rollouts import engine_kinds
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.engine_kinds import EngineRequest, load_frozen, open_engine
from osworld_pipeline.runs.rollouts.session import rollout_session

TOKEN = "a token"


class OtherEngine(TransformersEngine):
    name = "other"

    def __init__(self, request: EngineRequest) -> None:
        (self.size,) = request.recipe.engine.options.values()
        self.loaded: list[tuple[Path, int]] = []
        model = load_frozen(request.recipe, request.folder)
        super().__init__(model, request.processor, timeout_s=60, policy_version=request.policy_version)

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        self.loaded.append((path, policy_version))
        await super().load_weights(path, policy_version=policy_version)


def refuse(request: EngineRequest) -> OtherEngine:
    raise EngineError("its server does not answer")


def recipe_of(kind: str, **options: Any) -> Recipe:
    fields = load_recipe("smoke").model_dump(mode="json")
    fields["engine"] |= {"kind": kind, "options": options}
    return Recipe.model_validate(fields)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """An installed distribution with the engine `other`; the parameter is its function, if not OtherEngine."""
    value = getattr(request, "param", f"{__name__}:OtherEngine")
    point = EntryPoint(name="other", value=value, group=engine_names.ENTRY_POINTS)
    for module in (engine_names, engine_kinds):
        monkeypatch.setattr(module, "entry_points", lambda *, group: [point])


def test_each_of_our_names_has_an_engine_and_an_unknown_name_is_refused_with_the_known_ones() -> None:
    assert set(engine_kinds._OURS) == set(engine_names.OURS)
    with pytest.raises(ValidationError, match="no engine is named 'vlm'; there are: transformers, sglang, openai"):
        recipe_of("vlm")


@pytest.mark.usefixtures("other")
async def test_an_engine_of_another_distribution_gets_its_options_and_the_checkpoint_and_is_probed(
    tiny_folder: Path, processor: Any, tmp_path: Path
) -> None:
    recipe = recipe_of("other", size=3)
    async with painted_server(tmp_path / "server", token=SecretStr(TOKEN)) as server:
        servers = EnvServers(urls=(server.url,), token=TOKEN, num_replicas=1)
        async with rollout_session(
            recipe=recipe, state=StateDir(tmp_path / "state"), servers=servers, purpose="c", folder=tiny_folder,
            processor=processor, policy_version=4,
        ) as session:  # fmt: skip
            assert isinstance(session.engine, OtherEngine)
            assert (session.engine.size, session.engine.loaded) == (3, [(tiny_folder, 4)])
            assert session.parity is not None
            assert session.parity.metrics()["parity_mean_diff"] < 1e-4


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        ("no_such_module:open", DependencyError, "the engine 'other' of no_such_module:open cannot be opened"),
        (f"{__name__}:OtherEngine", DependencyError, "check engine.options"),
        (f"{__name__}:refuse", EngineError, "its server does not answer"),
    ],
    indirect=["other"],
)
@pytest.mark.usefixtures("other")
def test_an_engine_that_cannot_be_opened_is_named(error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_engine(EngineRequest(recipe=recipe_of("other")))
