"""Weights that are sent to policy servers through a real process group: they arrive bit for bit, and a server whose
transfer was cut off is not sampled from."""

import asyncio
import pickle
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from chaos import Server, policy_server
from sampling_servers import open_place, recipe_of
from sglang_samples import text_request

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateResult
from osworld_pipeline.recipes.schema import EngineSection, TinyModelSection
from osworld_pipeline.rollout.engines import sglang_broadcast
from osworld_pipeline.rollout.engines.http_calls import TransientError
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.rollout.engines.sglang_newcomers import Peer
from osworld_pipeline.rollout.engines.sglang_server import Gate
from osworld_pipeline.rollout.engines.sglang_weights import Consume, TrainedWeights, WeightStream
from osworld_pipeline.rollout.engines.update_group import Bucket, Packer, UpdateGroup, read_weights_of
from osworld_pipeline.runs.placement import RayShare
from osworld_pipeline.runs.rollouts import ray_rollouts
from osworld_pipeline.runs.rollouts.ray_actor import Weights
from osworld_pipeline.runs.rollouts.ray_pool import PooledActor
from osworld_pipeline.training.distributed.sharding import each_weight
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint

VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the tokenizer and the shapes of `tiny_folder`."""
    folder = tmp_path_factory.mktemp("other") / "checkpoint"
    spec = TinyModelSection(
        kind="tiny", hidden_size=64, num_layers=2, vision_hidden_size=48, vision_depth=1, vocab_size=512, seed=9
    )
    build_tiny_checkpoint(folder, spec, ["Action: rename the folder\n[Task]\nRename the folder alpha to bravo."])
    return folder


@pytest.fixture(scope="module")
def servers(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(policy_server(tmp_path_factory.mktemp(name), checkpoint=tiny_folder))
            for name in ("one", "two")
        )
        for server in (one, two):
            server.wait_ready()
        yield one, two


@pytest.fixture(autouse=True)
def all_servers_run(servers: tuple[Server, Server]) -> None:
    for server in servers:
        if not server.is_running:
            server.start()
            server.wait_ready()


@asynccontextmanager
async def engine_of(renderer: Renderer, *servers: Server, owner: str, **settings: Any) -> AsyncIterator[SglangEngine]:
    section = EngineSection(
        kind="sglang",
        urls=tuple(server.url for server in servers),
        weights="broadcast",
        **{"request_timeout_s": 10.0, "retry_budget_s": 20.0, **settings},
    )
    engine = SglangEngine(section.urls, renderer=renderer, section=section, vocab_size=VOCAB_SIZE, owner=owner)
    try:
        yield engine
    finally:
        await engine.close()


async def sampled(engine: SglangEngine, renderer: Renderer) -> list[GenerateResult]:
    """One response of each server that holds the weights."""
    request = text_request(renderer, max_new_tokens=6, top_p=1.0)
    return [await generate(request) for generate in engine.by_server().values()]


def logprobs_of(model: Any, renderer: Renderer, result: GenerateResult) -> Sequence[float]:
    request = text_request(renderer)
    ids = torch.tensor([[*request.token_ids, *result.token_ids]])
    with torch.no_grad():
        logits_TV = model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1].float()
    logits_TV[:, list(renderer.banned_ids(VOCAB_SIZE))] = -torch.inf
    logprobs_TV = (logits_TV / 0.7).log_softmax(dim=-1)
    return [float(logprobs_TV[index, token_id]) for index, token_id in enumerate(result.token_ids)]


def info_of(server: Server) -> dict[str, Any]:
    return httpx.get(f"{server.url}/model_info", trust_env=False).json()


def trained(model: Any, like: Path, name: str, run: Callable[[Consume], Any] | None = None) -> TrainedWeights:
    async def send(consume: Consume) -> None:
        await asyncio.to_thread(consume, each_weight(model))

    num_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    return TrainedWeights(name=name, like=like, vision=name, stream=WeightStream(num_bytes=num_bytes, run=run or send))


async def test_a_checkpoint_and_then_a_trainers_weights_reach_two_servers(
    servers: tuple[Server, Server], renderer: Renderer, tiny_folder: Path, other_folder: Path
) -> None:
    model = load_model(other_folder, is_frozen=True)
    async with engine_of(renderer, *servers, owner="arrives") as engine:
        await engine.load_weights(other_folder, policy_version=3)
        for result in await sampled(engine, renderer):
            assert result.policy_version == 3
            assert result.logprobs == pytest.approx(logprobs_of(model, renderer, result), abs=1e-5)
        generator = torch.Generator().manual_seed(0)
        for tensor in model.state_dict().values():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
        await engine.load_trained(trained(model, other_folder, "sent-arrives"), policy_version=4)
        results = await sampled(engine, renderer)
    assert len(results) == 2
    for result in results:
        assert result.policy_version == 4
        assert result.logprobs == pytest.approx(logprobs_of(model, renderer, result), abs=1e-5)
    assert {info_of(server)["model_path"] for server in servers} == {str(tiny_folder)}, (
        "no server has read another folder"
    )


async def test_the_other_server_keeps_sampling_during_a_rolling_update(
    servers: tuple[Server, Server], renderer: Renderer, tiny_folder: Path, other_folder: Path
) -> None:
    model, versions = load_model(other_folder, is_frozen=True), list[set[int]]()

    async with engine_of(renderer, *servers, owner="rolls", update_servers="rolling") as engine:
        await engine.load_weights(tiny_folder, policy_version=1)

        async def run(consume: Consume) -> None:
            request = text_request(renderer, max_new_tokens=2, top_p=1.0)
            async with asyncio.timeout(10):
                versions.append({(await engine.generate(request)).policy_version})
            await asyncio.to_thread(consume, each_weight(model))

        await engine.load_trained(trained(model, other_folder, "sent-rolls", run), policy_version=2)
        assert {result.policy_version for result in await sampled(engine, renderer)} == {2}
    assert versions == [{1}, {2}], "one transfer for each server, and the other one samples meanwhile"


@pytest.mark.parametrize("responses", ["keep", "wait"])
async def test_a_half_done_response_mixes_weights_unless_the_update_waits_for_it(
    responses: str, servers: tuple[Server, Server], renderer: Renderer, tiny_folder: Path, other_folder: Path
) -> None:
    async with engine_of(
        renderer, servers[0], owner=f"half-{responses}", running_responses=responses, request_timeout_s=60.0
    ) as engine:
        await engine.load_weights(tiny_folder, policy_version=1)
        request = text_request(renderer, temperature=0.0, max_new_tokens=1000, top_p=1.0, stop=())
        asked = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.5)
        assert not asked.done(), "the response was over before the update: ask for more tokens"
        await engine.load_weights(other_folder, policy_version=2)
        result = await asked
    assert set(result.policy_versions) == ({1, 2} if responses == "keep" else set())
    assert result.policy_version == 1


async def test_a_closed_gate_lets_no_request_pass_and_waits_for_those_inside() -> None:
    gate, order = Gate(), []

    async def request(name: str, seconds: float) -> None:
        async with gate.passing():
            await asyncio.sleep(seconds)
            order.append(name)

    running = [asyncio.create_task(request("first", 0.05)), asyncio.create_task(request("second", 0.1))]
    await asyncio.sleep(0)
    async with gate.closed(limit_s=5.0):
        late = asyncio.create_task(request("late", 0.0))
        await asyncio.sleep(0.05)
        order.append("load")
    await asyncio.gather(*running, late)
    assert order == ["first", "second", "load", "late"]


async def test_a_gate_waits_no_longer_than_its_limit() -> None:
    gate = Gate()
    async with gate.passing(), asyncio.timeout(5), gate.closed(limit_s=0.05):
        pass
    async with gate.passing():
        pass


async def test_a_server_killed_in_a_transfer_is_left_out_and_gets_the_weights_when_it_is_back(
    servers: tuple[Server, Server], renderer: Renderer, other_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_broadcast, "STEP_TIMEOUT_S", 5.0)
    model, tries = load_model(other_folder, is_frozen=True), 0

    async def run(consume: Consume) -> None:
        nonlocal tries
        tries += 1

        def cut_off() -> Iterator[tuple[str, torch.Tensor]]:
            for index, (name, tensor) in enumerate(each_weight(model)):
                if tries == 1 and index == 5:
                    servers[1].kill()
                # There are two buckets; the killed server receives nothing of the second one.
                yield name, tensor if index % 2 else tensor.clone()

        await asyncio.to_thread(consume, cut_off())

    monkeypatch.setattr(
        "osworld_pipeline.rollout.engines.update_group.Packer.__init__",
        _packer_with(max_bytes=1024),
    )
    async with engine_of(renderer, *servers, owner="killed", retry_budget_s=60.0) as engine:
        await engine.load_trained(trained(model, other_folder, "sent-killed", run), policy_version=7)
        assert tries == 2
        (result,) = await sampled(engine, renderer)
        assert result.logprobs == pytest.approx(logprobs_of(model, renderer, result), abs=1e-5)
        servers[1].start()
        servers[1].wait_ready()
        second = engine._servers[1]
        second.out_until = 0.0
        back = await engine._generate(text_request(renderer, max_new_tokens=3, top_p=1.0), second)
    assert back.policy_version == 7
    assert tries == 3
    assert back.logprobs == pytest.approx(logprobs_of(model, renderer, back), abs=1e-5)


async def test_a_killed_sender_leaves_an_incomplete_label_and_the_next_sender_loads_its_weights(
    servers: tuple[Server, Server], renderer: Renderer, tiny_folder: Path, other_folder: Path
) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SENDER, servers[0].url, str(other_folder), str(tiny_folder)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert program.stdout is not None
    assert await program.stdout.readline() == b"half\n"
    program.kill()
    await program.wait()
    assert info_of(servers[0])["weight_version"].startswith(sglang_broadcast.INCOMPLETE)
    async with engine_of(renderer, servers[0], owner="next", retry_budget_s=60.0) as engine:
        await engine.load_weights(other_folder, policy_version=2)
        (result,) = await sampled(engine, renderer)
    model = load_model(other_folder, is_frozen=True)
    assert result.logprobs == pytest.approx(logprobs_of(model, renderer, result), abs=1e-5)


SENDER = textwrap.dedent(
    """
    import asyncio, sys, threading
    from pathlib import Path
    from osworld_pipeline.agent.processor import load_processor
    from osworld_pipeline.agent.renderer import Renderer
    from osworld_pipeline.recipes.schema import EngineSection
    from osworld_pipeline.rollout.engines import sglang_broadcast, sglang_weights, update_group
    from osworld_pipeline.rollout.engines.sglang import SglangEngine

    sglang_broadcast.STEP_TIMEOUT_S = 2.0  # its lock expires soon
    update_group.Packer.__init__.__kwdefaults__["max_bytes"] = 1024

    async def run(consume):
        def half():
            for index, pair in enumerate(update_group.read_weights_of(Path(sys.argv[2]))):
                if index == 20:
                    print("half", flush=True)
                    threading.Event().wait()
                yield pair
        await asyncio.to_thread(consume, half())

    async def main():
        renderer = Renderer(load_processor(Path(sys.argv[3])))
        section = EngineSection(kind="sglang", urls=(sys.argv[1],), weights="broadcast")
        engine = SglangEngine(section.urls, renderer=renderer, section=section, vocab_size=320, owner="dead")
        stream = sglang_weights.WeightStream(num_bytes=1, run=run)
        weights = sglang_weights.TrainedWeights(name="sent-dead", like=Path(sys.argv[2]), vision="", stream=stream)
        await engine.load_trained(weights, policy_version=1)

    asyncio.run(main())
    """
)


async def test_weights_that_the_trainer_no_longer_has_are_not_sent(
    servers: tuple[Server, Server], renderer: Renderer, other_folder: Path
) -> None:
    async def run(consume: Consume) -> None:
        raise TransientError("the trainer no longer has the weights of update 1")

    model = load_model(other_folder, is_frozen=True)
    async with engine_of(renderer, servers[0], owner="late", retry_budget_s=1.0) as engine:
        with pytest.raises(EngineError, match="no longer has the weights of update 1"):
            await engine.load_trained(trained(model, other_folder, "sent-late", run), policy_version=1)
        assert info_of(servers[0])["weight_version"].startswith(sglang_broadcast.INCOMPLETE)
        assert not engine.by_server()


async def test_a_program_that_cannot_send_waits_for_the_one_that_can(
    servers: tuple[Server, Server], renderer: Renderer, tiny_folder: Path, other_folder: Path
) -> None:
    model = load_model(other_folder, is_frozen=True)
    sent = trained(model, other_folder, "sent-shared")
    received = TrainedWeights(name="sent-shared", like=other_folder, vision="sent-shared")
    async with (
        engine_of(renderer, servers[0], owner="shared") as trainer,
        engine_of(renderer, servers[0], owner="shared") as actor,
    ):
        for engine in (trainer, actor):
            await engine.load_weights(tiny_folder, policy_version=1)
        waiting = asyncio.create_task(actor.load_trained(received, policy_version=2))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await trainer.load_trained(sent, policy_version=2)
        await waiting
        (result,) = await sampled(actor, renderer)
    assert result.policy_version == 2


async def test_the_only_server_gets_the_weights_again_and_is_compared_with_what_the_trainer_saves(
    servers: tuple[Server, Server], renderer: Renderer, other_folder: Path, tmp_path: Path
) -> None:
    model, compared = load_model(other_folder, is_frozen=True), []

    async def save() -> Path:
        await asyncio.to_thread(model.save_pretrained, tmp_path / "saved")
        return tmp_path / "saved"

    async def compare(newcomer: Peer, reference: Peer | Path) -> None:
        compared.append(reference)

    async with engine_of(renderer, servers[0], owner="only") as engine:
        weights = replace(trained(model, other_folder, "sent-only"), save=save)
        await engine.load_trained(weights, policy_version=5)
        await engine.compare_newcomers(compare, passed=set(engine.by_server()), warn=print)
        servers[0].kill()
        servers[0].start()
        servers[0].wait_ready()
        (only,) = engine._servers
        only.lost()  # as after a request that the kill interrupted
        await engine._keep_lease(only, 1)
        assert only.standing.has_passed
        result = await engine.generate(text_request(renderer, max_new_tokens=4, top_p=1.0))
    assert compared == [tmp_path / "saved"]
    assert result.policy_version == 5
    assert result.logprobs == pytest.approx(logprobs_of(model, renderer, result), abs=1e-5)


class PoolInProcess:
    """The pool of two actors, whose messages are pickled as Ray does."""

    def __init__(self, actors: Sequence[PooledActor]) -> None:
        self.open_session: Any = None
        self._actors = actors

    async def least_busy(self) -> Any:
        return 0

    async def call(self, slot: int, method: str, *arguments: Any, limit_s: float) -> Any:
        return await self._actors[slot].call(method, *pickle.loads(pickle.dumps(arguments)))

    async def call_each(self, method: str, *arguments: Any, limit_s: float) -> list[Any]:
        return [await self.call(slot, method, *arguments, limit_s=limit_s) for slot in range(len(self._actors))]

    async def update(self, open_session: Any, method: str, *arguments: Any, limit_s: float) -> None:
        self.open_session = open_session
        await self.call_each(method, *arguments, limit_s=limit_s)


async def test_rollout_actors_sample_what_the_trainers_program_has_sent(
    servers: tuple[Server, Server],
    tiny_folder: Path,
    other_folder: Path,
    processor: Any,
    renderer: Renderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @asynccontextmanager
    async def open_pool(open_session: Any, share: Any, *, purpose: str) -> AsyncIterator[PoolInProcess]:
        actors = [PooledActor(), PooledActor()]
        for number, actor in enumerate(actors):
            await actor.open(open_session, f"actor-{number}")
        try:
            yield PoolInProcess(actors)
        finally:
            for actor in actors:
                await actor.close()

    monkeypatch.setattr(ray_rollouts, "open_pool", open_pool)
    model = load_model(other_folder, is_frozen=True)
    with open_place(tiny_folder, tmp_path / "state", processor) as place:
        recipe = recipe_of(kind="sglang", urls=[one.url for one in servers], weights="broadcast")
        async with ray_rollouts.ray_rollouts(
            recipe,
            place.state,
            place.env,
            Weights(folder=tiny_folder, policy_version=1),
            RayShare(num_rollout_actors=2),
            purpose="phase",
            max_turns=2,
            processor=processor,
        ) as rollouts:
            assert rollouts.parity is not None
            await rollouts.load_trained(trained(model, other_folder, "sent-actors"), policy_version=2)
            result = await rollouts.generate(text_request(renderer, max_new_tokens=4, top_p=1.0))
            # An actor that starts now does not wait for a transfer.
            late = PooledActor()
            await late.open(rollouts._pool.open_session, "late")
            again = await late.call("generate", text_request(renderer, max_new_tokens=4, top_p=1.0))
            await late.close()
    for one in (result, again):
        assert one.policy_version == 2
        assert one.logprobs == pytest.approx(logprobs_of(model, renderer, one), abs=1e-5)


def _packer_with(*, max_bytes: int) -> Callable[..., None]:
    original = Packer.__init__

    def init(self: Packer, emit: Callable[[Bucket, bool], None]) -> None:
        original(self, emit, max_bytes=max_bytes)

    return init


def test_buckets_keep_to_their_size_and_one_dtype_and_only_the_last_is_marked_as_last() -> None:
    emitted: list[tuple[Bucket, bool]] = []
    packer = Packer(lambda bucket, is_last: emitted.append((bucket, is_last)), max_bytes=64)
    tensors = {
        "a": torch.arange(8, dtype=torch.float32),
        "b": torch.arange(8, dtype=torch.float32).view(2, 4).t(),
        "c": torch.tensor(3.0, dtype=torch.bfloat16),
        "large": torch.arange(100, dtype=torch.bfloat16),
        "d": torch.ones(1, dtype=torch.bfloat16),
    }
    for name, tensor in tensors.items():
        packer.add(name, tensor)
    packer.finish()
    assert [(bucket.names, is_last) for bucket, is_last in emitted] == [
        (("a", "b"), False), (("c",), False), (("large",), False), (("d",), True),
    ]  # fmt: skip
    for bucket, _ in emitted:
        dtype = getattr(torch, bucket.dtype)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in bucket.shapes]
        parts = bucket.data.split(sizes)
        for name, shape, part in zip(bucket.names, bucket.shapes, parts, strict=True):
            assert torch.equal(part.view(dtype).view(shape), tensors[name])


def test_weights_that_are_read_from_a_folder_equal_those_of_the_loaded_model(tiny_folder: Path) -> None:
    names = dict(read_weights_of(tiny_folder))
    state = load_model(tiny_folder, is_frozen=True).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in names.items())


def test_a_group_whose_ranks_do_not_join_fails_within_its_timeout() -> None:
    group = UpdateGroup(address="127.0.0.1", world_size=2, timeout_s=1.0)
    with pytest.raises(EngineError, match="not all ranks of the policy servers have joined"):
        group.connect(torch.device("cpu"))
    group.close()


def test_an_address_of_another_host_is_refused_and_its_setting_is_named() -> None:
    with pytest.raises(EngineError, match=r"set engine\.weights_address to an address of this host"):
        UpdateGroup(address="192.0.2.1", world_size=2, timeout_s=1.0)
