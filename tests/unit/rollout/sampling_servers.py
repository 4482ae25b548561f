"""Fake sglang servers that really sample, each with a given defect, and a place where rollout sessions with them are
opened."""

import base64
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from defective_engine import DefectiveEngine
from fake_policy_server import FakeSglang, serving

from osworld_pipeline.agent.adapters import Base, is_factor
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.protocols import GenerateRequest
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.recipes.schema import LoraSection
from osworld_pipeline.runs.rollouts.embedded_server import EnvServers
from osworld_pipeline.runs.rollouts.session import RolloutSession, rollout_session
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.weights import lora
from osworld_pipeline.training.weights.weights_digest import weights_digest


@dataclass(kw_only=True, eq=False)
class SamplingServer(FakeSglang):
    """Speaks sglang's /generate, and really samples, with the defect of its engine."""

    engine: DefectiveEngine
    loads_really: bool = False
    """Whether it samples from the weights that it says it has loaded."""
    num_sampled: int = 0
    num_scored: int = 0
    """Requests for the log-probability of a given token."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def restart(self) -> None:
        """Another process at the same address: it has the weights and the sessions of its start."""
        self.label, self.sessions = "default", {}

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        folder = Path(body["model_path"])
        if self.loads_really and (folder / "config.json").is_file():  # not a check's single tensor
            with self.lock:
                self.engine.change_weights(load_model(folder, is_frozen=True))
        return super()._load(body)

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        watched = body.get("token_ids_logprob", ())
        if len(watched) > 1:  # a check of its settings
            return super()._generate(body)
        with self.lock:
            reported = body["sampling_params"]
            request = GenerateRequest(
                sampling=SamplingParams(
                    temperature=reported["temperature"],
                    max_new_tokens=reported["max_new_tokens"],
                    seed=reported["sampling_seed"],
                ),
                token_ids=tuple(self._expand(body)),
                images=tuple(base64.b64decode(image) for image in body.get("image_data", ())),
            )
            if watched:
                self.num_scored += 1
                ids, logprobs = watched, [self.engine.score(request, watched[0])]
            else:
                self.num_sampled += 1
                result = self.engine.sample(request)
                ids, logprobs = result.token_ids, result.logprobs
            self.reply = tuple(ids)
            answer = super()._generate(body)
        entries = [[logprob, token_id, None] for logprob, token_id in zip(logprobs, ids, strict=True)]
        answer["meta_info"] |= {"output_token_logprobs": entries, "output_token_ids_logprobs": [entries]}
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

    def session(self, recipe: Recipe, **options: Any) -> AbstractAsyncContextManager[RolloutSession]:
        return rollout_session(
            recipe=recipe, state=self.state, servers=self.env, purpose="p", processor=self.processor, **options
        )


@contextmanager
def open_place(folder: Path, state: Path, processor: Any) -> Iterator[Place]:
    with ExitStack() as stack:
        env = stack.enter_context(serving(EnvServerWithoutDesktops(reply=(0,), image_id=0)))
        yield Place(
            folder=folder,
            state=StateDir(state),
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


def make_adapter(folder: Path, place: Path) -> Path:
    """A checkpoint that is an adapter over the one in `folder`."""
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
