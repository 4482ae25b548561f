"""The engine against a real sglang server: the log-probabilities that it reports equal those of transformers."""

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_server import SglangProcess, sglang_process
from trace_collector import Collector, collecting_traces, tracing_to
from transformers import Qwen3VLForConditionalGeneration
from weights_receiver import TOKEN, receiving

from osworld_pipeline.agent.adapters import Base, is_factor
from osworld_pipeline.agent.logits import project_logits
from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.observation_text import system_message, user_message
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.recipes.schema import EngineSection, LoraSection, TinyModelSection
from osworld_pipeline.rollout.engines.sglang import SglangEngine
from osworld_pipeline.runs.parity.newcomer import newcomer_check
from osworld_pipeline.runs.parity.probe import probe_parity
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint
from osworld_pipeline.training.weights import lora
from osworld_pipeline.training.weights.weights_digest import weights_digest
from osworld_pipeline.wire.tracing import episode_span, span

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1500)]
TOLERANCE = 1e-4
VOCAB_SIZE = 320
"""Of the tiny model's embedding; its tokenizer is a little shorter."""
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZE = (320, 192)
Noise = Callable[[int, int, int], bytes]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints with one tokenizer and different weights, also of the vision tower; ids beyond the tokenizer."""
    parent = tmp_path_factory.mktemp("checkpoints")
    folders = (parent / "one", parent / "two")
    torch.set_num_threads(1)
    for seed, folder in enumerate(folders):
        spec = TinyModelSection(
            kind="tiny",
            hidden_size=64,
            num_layers=2,
            vision_hidden_size=48,
            vision_depth=1,
            vocab_size=512,
            seed=seed,
        )
        build_tiny_checkpoint(folder, spec, ["Action: rename the folder\n[Task]\nRename the folder alpha to bravo."])
    return folders


@pytest.fixture(scope="module")
def server(checkpoints: tuple[Path, Path]) -> Iterator[SglangProcess]:
    with sglang_process(checkpoints[0]) as process:
        yield process


@pytest.fixture(scope="module")
def renderer(checkpoints: tuple[Path, Path]) -> Renderer:
    from osworld_pipeline.agent.processor import load_processor

    return Renderer(load_processor(checkpoints[0]))


@pytest.fixture(scope="module")
def models(checkpoints: tuple[Path, Path]) -> dict[int, Any]:
    """The models, by the policy version under which the tests load each of them."""
    return {
        version: Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        for version, folder in enumerate(checkpoints, start=1)
    }


@asynccontextmanager
async def engine_of(
    url: str, renderer: Renderer, *, owner: str = "test", token: str | None = None, **settings: Any
) -> AsyncIterator[SglangEngine]:
    section = EngineSection(kind="sglang", urls=(url,), **{"request_timeout_s": 120.0, **settings})
    engine = SglangEngine(
        section.urls, renderer=renderer, section=section, vocab_size=VOCAB_SIZE, owner=owner, token=token
    )
    try:
        yield engine
    finally:
        await engine.close()


class Conversation:
    def __init__(self, renderer: Renderer, noise_png: Noise, seed: int) -> None:
        self._renderer = renderer
        self._noise_png = noise_png
        self._seed = seed
        self._ids = renderer.turn(system_message(f"You operate computer {seed}."))
        self._images: list[bytes] = []

    def ask(self, **sampling: Any) -> GenerateRequest:
        self._images.append(self._noise_png(*SIZE, 100 * self._seed + len(self._images)))
        self._ids += self._renderer.turn(user_message("Open the text editor."), [SIZE])
        self._ids += self._renderer.generation_prompt
        defaults = {"temperature": 0.8, "max_new_tokens": 12, "stop": (), "seed": self._seed}
        return GenerateRequest(
            sampling=SamplingParams(**{**defaults, **sampling}),
            token_ids=tuple(self._ids),
            images=tuple(self._images),
            episode_id=f"episode-{self._seed}",
        )

    def receive(self, result: GenerateResult) -> None:
        self._ids += result.token_ids
        if result.token_ids[-1] != self._renderer.im_end_id:
            self._ids.append(self._renderer.im_end_id)
        self._ids += self._renderer.newline_ids


def differences(model: Any, renderer: Renderer, request: GenerateRequest, result: GenerateResult) -> Sequence[float]:
    """The difference of each reported log-probability from a plain forward pass of transformers: softmax(logits / T)
    over the ids that are not banned."""
    sequence = (request.token_ids + result.token_ids, request.images)
    arrays = build_model_inputs(renderer.processor, [sequence])
    with torch.no_grad():
        hidden_1TD = model.model(**{name: torch.from_numpy(array) for name, array in arrays.items()}).last_hidden_state
        logits_TV = project_logits(model.lm_head, hidden_1TD[0])
    logits_TV[:, list(renderer.banned_ids(VOCAB_SIZE))] = -torch.inf
    logprobs_TV = (logits_TV / (request.sampling.temperature or 1.0)).log_softmax(dim=-1)
    first = len(request.token_ids) - 1
    return [
        abs(float(logprobs_TV[first + index, token_id]) - logprob)
        for index, (token_id, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True))
    ]


@pytest.mark.parametrize("weights", ["folder", "broadcast", "upload"])
async def test_log_probabilities_equal_transformers_over_turns_and_weight_updates(
    weights: str,
    server: SglangProcess,
    checkpoints: tuple[Path, Path],
    renderer: Renderer,
    models: dict[int, Any],
    noise_png: Noise,
    tmp_path: Path,
) -> None:
    worst: dict[int, float] = {}
    num_loads = server.num_loads()
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {"weights": weights}
        if weights == "upload":
            receiver = stack.enter_context(receiving(tmp_path / "received"))
            settings["receiver_port"] = receiver.port
        # The server has no token and ignores the receiver's.
        token = TOKEN if weights == "upload" else None
        engine = await stack.enter_async_context(engine_of(server.url, renderer, token=token, **settings))
        await engine.health()
        # The first again at the end, because the server has seen its images under the other weights by then.
        for version in (1, 2, 1):
            await engine.load_weights(checkpoints[version - 1], policy_version=version)
            if version == 1:
                report = await probe_parity(
                    engine,
                    engine.by_server(),
                    recipe=load_recipe("smoke"),
                    renderer=renderer,
                    load_reference=lambda device: models[1],
                )
                assert report.mean_diff < TOLERANCE
            conversations = [Conversation(renderer, noise_png, seed) for seed in range(4)]
            for _ in range(3):
                requests = [conversation.ask() for conversation in conversations]
                results = await asyncio.gather(*(engine.generate(request) for request in requests))
                for conversation, request, result in zip(conversations, requests, results, strict=True):
                    assert result.policy_version == version
                    largest = max(differences(models[version], renderer, request, result))
                    worst[version] = max(worst.get(version, 0.0), largest)
                    conversation.receive(result)
    print(f"{weights}: largest difference from transformers by weights: {worst}")
    if weights == "broadcast":
        assert server.num_loads() == num_loads, "nothing is read from a folder"
    assert max(worst.values()) < TOLERANCE


async def test_a_server_scores_given_tokens_as_it_sampled_them(
    server: SglangProcess, checkpoints: tuple[Path, Path], renderer: Renderer, noise_png: Noise
) -> None:
    """The server scores by prefill, at the request's temperature and without the banned ids. A server that joins is
    compared in this way."""
    async with engine_of(server.url, renderer) as engine:
        await engine.load_weights(checkpoints[0], policy_version=1)
        peer, largest = engine._peer(engine._servers[0]), []
        for temperature in (0.7, 2.0):
            conversation = Conversation(renderer, noise_png, 300)
            for _ in range(2):
                request = conversation.ask(temperature=temperature, max_new_tokens=6)
                result = await peer.generate(request)
                scores = await peer.score(request, result.token_ids)
                pairs = zip(scores, result.logprobs, strict=True)
                largest.append(max(abs(score - logprob) for score, logprob in pairs))
                conversation.receive(result)
    print(f"largest difference between sampled and given tokens: {max(largest):.2g}")
    assert max(largest) < TOLERANCE


async def test_the_only_server_is_compared_with_its_checkpoint_once_per_server_process(
    server: SglangProcess, checkpoints: tuple[Path, Path], renderer: Renderer, noise_png: Noise
) -> None:
    loaded, warnings = [], []

    def load(folder: Path) -> Any:
        loaded.append(folder)
        return load_model(folder, is_frozen=True)

    check = newcomer_check(load_recipe("smoke"), renderer, load=load)
    for _ in range(2):
        async with engine_of(server.url, renderer, owner="newcomers") as engine:
            await engine.load_weights(checkpoints[1], policy_version=2)
            await engine.compare_newcomers(check, passed=(), warn=warnings.append)
            request = Conversation(renderer, noise_png, 310).ask()
            assert (await engine.generate(request)).policy_version == 2
    assert loaded == [checkpoints[1].resolve()], "the mark of the run is left on the process"
    assert not warnings


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(0.5, 1.0), (0.8, 1.0), (1.5, 1.0), (0.0, 1.0), (0.8, 0.5)], ids=str
)
async def test_log_probabilities_are_those_of_the_sampled_distribution(
    server: SglangProcess,
    checkpoints: tuple[Path, Path],
    renderer: Renderer,
    models: dict[int, Any],
    noise_png: Noise,
    temperature: float,
    top_p: float,
) -> None:
    """They are over the ids that are not banned. top-p restricts the choice and not the reported value."""
    async with engine_of(server.url, renderer) as engine:
        await engine.load_weights(checkpoints[0], policy_version=1)
        sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": 40}
        requests = [Conversation(renderer, noise_png, 200 + seed).ask(**sampling) for seed in range(6)]
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
    largest = [
        max(differences(models[1], renderer, request, result))
        for request, result in zip(requests, results, strict=True)
    ]
    print(f"temperature {temperature:g}, top-p {top_p:g}: largest difference {max(largest):.2g}")
    assert max(largest) < TOLERANCE


async def test_sampled_tokens_follow_the_reported_distribution(
    server: SglangProcess, checkpoints: tuple[Path, Path], renderer: Renderer, models: dict[int, Any]
) -> None:
    """Compares the first token of many responses with the model's probabilities over the ids that are not banned."""
    num_responses, temperature = 1500, 0.5
    prompt = (*renderer.encode("Open the editor."), *renderer.generation_prompt)
    request = GenerateRequest(
        sampling=SamplingParams(temperature=temperature, max_new_tokens=1, stop=()), token_ids=prompt
    )
    async with engine_of(server.url, renderer) as engine:
        await engine.load_weights(checkpoints[0], policy_version=1)
        slots = asyncio.Semaphore(32)

        async def ask(seed: int) -> int:
            async with slots:
                sampling = replace(request.sampling, seed=seed)
                return (await engine.generate(replace(request, sampling=sampling))).token_ids[0]

        sampled = await asyncio.gather(*(ask(seed) for seed in range(num_responses)))
    with torch.no_grad():
        logits_V = models[1](input_ids=torch.tensor([prompt])).logits[0, -1].double()
    logits_V[list(renderer.banned_ids(VOCAB_SIZE))] = -torch.inf
    expected_V = num_responses * (logits_V / temperature).softmax(dim=-1)
    counts_V = torch.bincount(torch.tensor(sampled), minlength=VOCAB_SIZE).double()
    allowed_V = expected_V > 0
    assert counts_V[~allowed_V].sum() == 0
    chi_squared = float(((counts_V - expected_V) ** 2 / expected_V)[allowed_V].sum())
    freedom = int(allowed_V.sum()) - 1
    print(f"chi-squared {chi_squared:.0f} at {freedom} degrees of freedom")
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


async def test_four_engines_in_two_processes_load_each_set_of_weights_once(
    server: SglangProcess, checkpoints: tuple[Path, Path], renderer: Renderer
) -> None:
    async with engine_of(server.url, renderer) as engine:
        # This checks the vision cache, which is then not checked again.
        for path in checkpoints:
            await engine.load_weights(path, policy_version=1)
    before = server.num_loads()
    command = [sys.executable, str(Path(__file__).parents[1] / "sglang_engines.py"), server.url, str(checkpoints[0])]
    pipe = asyncio.subprocess.PIPE
    programs = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(2)]

    async def go_on(program: asyncio.subprocess.Process, version: int, path: Path) -> None:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{version} {path}\n".encode())
        assert await program.stdout.readline() == f"{version}\n".encode()

    try:
        order = (checkpoints[0], checkpoints[1], checkpoints[0])
        for version, path in enumerate(order, start=1):
            await asyncio.gather(*(go_on(program, version, path) for program in programs))
            await asyncio.sleep(3)
        said = [(await program.communicate(b""))[0].decode().strip() for program in programs]
    finally:
        for program in programs:
            if program.returncode is None:
                program.kill()
    print(f"answers by policy version: {said}")
    assert [program.returncode for program in programs] == [0, 0]
    assert server.num_loads() - before == len(order)


@pytest.mark.parametrize("responses", ["abort", "wait"])
async def test_a_partial_response_is_sampled_again_or_awaited_at_a_weight_update(
    responses: str, server: SglangProcess, checkpoints: tuple[Path, Path], renderer: Renderer, noise_png: Noise
) -> None:
    async with engine_of(server.url, renderer, running_responses=responses, weights="broadcast") as engine:
        await engine.load_weights(checkpoints[0], policy_version=1)
        asked = asyncio.create_task(
            engine.generate(Conversation(renderer, noise_png, 51).ask(temperature=0.0, max_new_tokens=1000))
        )
        await asyncio.sleep(1.5)
        assert not asked.done(), "the response was over before the update: ask for more tokens"
        loading = asyncio.create_task(engine.load_weights(checkpoints[1], policy_version=2))
        await asyncio.sleep(0.2)
        late = asyncio.create_task(engine.generate(Conversation(renderer, noise_png, 52).ask()))
        results = [await asked, await late]
        await loading
    assert [result.policy_versions for result in results] == [(), ()], "no response mixes two sets of weights"
    assert [result.policy_version for result in results] == [2 if responses == "abort" else 1, 2]


@pytest.mark.parametrize("weights", ["folder", "broadcast"])
async def test_a_partial_response_continues_after_a_weight_update_with_a_version_for_each_token(
    weights: str,
    server: SglangProcess,
    checkpoints: tuple[Path, Path],
    renderer: Renderer,
    models: dict[int, Any],
    noise_png: Noise,
) -> None:
    async with engine_of(server.url, renderer, weights=weights) as engine:
        await engine.load_weights(checkpoints[0], policy_version=1)
        request = Conversation(renderer, noise_png, 50).ask(temperature=0.0, max_new_tokens=3000)
        asked = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(1.5)
        await engine.load_weights(checkpoints[1], policy_version=2)
        assert not asked.done(), "the response was over before the update: ask for more tokens"
        result = await asked
    assert result.policy_version == 1
    assert set(result.policy_versions) == {1, 2}
    by_version = {version: differences(models[version], renderer, request, result) for version in (1, 2)}
    own = [by_version[version][index] for index, version in enumerate(result.policy_versions)]
    print(f"{result.policy_versions.count(1)} tokens before the update, {result.policy_versions.count(2)} after it")
    assert max(own) < TOLERANCE
    assert max(by_version[1]) > 100 * TOLERANCE


async def test_a_response_ends_after_its_stop_string_and_keeps_it(
    server: SglangProcess, checkpoints: tuple[Path, Path], renderer: Renderer, noise_png: Noise
) -> None:
    async with engine_of(server.url, renderer) as engine:
        await engine.load_weights(checkpoints[0], policy_version=1)
        free = await engine.generate(Conversation(renderer, noise_png, 60).ask(temperature=0.0))
        stop = renderer.decode_response(free.token_ids[:3])
        request = Conversation(renderer, noise_png, 60).ask(temperature=0.0, stop=(stop,))
        stopped = await engine.generate(request)
    assert free.finish_reason == "length"
    assert stopped.finish_reason == "stop"
    assert stopped.text == stop
    assert stopped.token_ids == free.token_ids[:3]


async def test_a_server_killed_in_a_request_is_a_fault_and_its_successor_gets_the_weights(
    server: SglangProcess,
    checkpoints: tuple[Path, Path],
    renderer: Renderer,
    models: dict[int, Any],
    noise_png: Noise,
) -> None:
    async with engine_of(server.url, renderer, retry_budget_s=3.0) as engine:
        await engine.load_weights(checkpoints[1], policy_version=2)
        long = Conversation(renderer, noise_png, 70).ask(temperature=0.0, max_new_tokens=2000)
        asked = asyncio.create_task(engine.generate(long))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(server.kill)
        start = time.monotonic()
        with pytest.raises(EngineError, match="given up after"):
            await asked
        assert time.monotonic() - start < 15
        port = int(server.url.rpartition(":")[2])
        process = sglang_process(checkpoints[0], port=port)
        await asyncio.to_thread(process.__enter__)
        try:
            request = Conversation(renderer, noise_png, 71).ask()
            result = await engine.generate(request)
        finally:
            await asyncio.to_thread(process.__exit__, None, None, None)
    assert result.policy_version == 2
    assert max(differences(models[2], renderer, request, result)) < TOLERANCE


async def test_lora_adapters_are_served_over_their_base(
    checkpoints: tuple[Path, Path], renderer: Renderer, tmp_path: Path, noise_png: Noise
) -> None:
    """The log-probabilities of an adapter's responses equal the trainer's forward pass, and the base is loaded once."""
    adapters = {version: write_adapter(tmp_path / f"adapter-{version}", checkpoints[0], version) for version in (1, 2)}
    arguments = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", *LORA_MODULES)
    process = sglang_process(checkpoints[0], *arguments)
    server = await asyncio.to_thread(process.__enter__)
    worst: dict[int, float] = {}
    try:
        async with engine_of(server.url, renderer) as engine:
            for version in (1, 2, 1):
                folder, model = adapters[version]
                await engine.load_weights(folder, policy_version=version)
                request = Conversation(renderer, noise_png, 90).ask(temperature=0.5, max_new_tokens=40)
                result = await engine.generate(request)
                assert result.policy_version == version
                worst[version] = max(differences(model, renderer, request, result))
            report = await probe_parity(
                engine,
                engine.by_server(),
                recipe=load_recipe("smoke"),
                renderer=renderer,
                load_reference=lambda device: load_model(adapters[1][0], is_frozen=True),
            )
            assert report.mean_diff < TOLERANCE
            await engine.load_weights(checkpoints[0], policy_version=0)
            base_result = await engine.generate(request)
            assert max(differences(adapters[1][1], renderer, request, base_result)) > 100 * TOLERANCE
        assert server.num_loads() == 1
    finally:
        await asyncio.to_thread(process.__exit__, None, None, None)
    print(f"largest difference from the trainer by adapter: {worst}")
    assert max(worst.values()) < TOLERANCE


def write_adapter(folder: Path, base: Path, seed: int) -> tuple[Path, Any]:
    """Writes a checkpoint that is an adapter over `base`, as the trainer does. Returns it and its loaded model."""
    section = LoraSection(rank=4, alpha=16.0)
    model = load_model(base)
    lora.add_adapters(model, section, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    factors = {name: tensor for name, tensor in model.state_dict().items() if is_factor(name)}
    for tensor in factors.values():
        tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    place = folder / "adapter"
    lora.save_adapter(place, model, factors, section, Base(folder=base, digest=weights_digest(base)), place=place)
    return folder, load_model(folder, is_frozen=True)


async def test_a_vision_cache_is_refused_when_the_vision_tower_changes(
    checkpoints: tuple[Path, Path], renderer: Renderer, tmp_path: Path, models: dict[int, Any], noise_png: Noise
) -> None:
    """The default vision cache is correct while the tower stays the same, and refused where the tower changes."""
    same_tower = tmp_path / "same-tower"
    shutil.copytree(checkpoints[0], same_tower)
    model = Qwen3VLForConditionalGeneration.from_pretrained(same_tower, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" not in name and parameter.ndim > 1:
                parameter.mul_(1.5)
    model.save_pretrained(same_tower)
    # In a thread, because a fixture would keep this server running next to the other one.
    process = sglang_process(checkpoints[0], env={"SGLANG_VLM_CACHE_SIZE_MB": "100"})
    server = await asyncio.to_thread(process.__enter__)
    try:
        async with engine_of(server.url, renderer) as engine:
            await engine.health()
            for version, path, expected in ((1, checkpoints[0], models[1]), (2, same_tower, model)):
                await engine.load_weights(path, policy_version=version)
                request = Conversation(renderer, noise_png, 80).ask()
                result = await engine.generate(request)
                assert max(differences(expected, renderer, request, result)) < TOLERANCE
            with pytest.raises(EngineError, match=r"another vision tower than .*SGLANG_VLM_CACHE_SIZE_MB=0"):
                await engine.load_weights(checkpoints[1], policy_version=3)
    finally:
        await asyncio.to_thread(process.__exit__, None, None, None)


async def test_log_probabilities_before_temperature_are_refused(
    checkpoints: tuple[Path, Path], renderer: Renderer
) -> None:
    process = sglang_process(checkpoints[0], env={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})
    server = await asyncio.to_thread(process.__enter__)
    try:
        async with engine_of(server.url, renderer) as engine:
            with pytest.raises(EngineError, match="without SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
                await engine.health()
    finally:
        await asyncio.to_thread(process.__exit__, None, None, None)


async def test_what_a_server_does_for_a_request_is_in_the_trace_of_its_episode(
    checkpoints: tuple[Path, Path], renderer: Renderer, noise_png: Noise
) -> None:
    with collecting_traces() as collector:
        process = sglang_process(
            checkpoints[0],
            *("--enable-trace", "--otlp-traces-endpoint", f"{collector.url}/v1/traces"),
            env={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
        )
        server = await asyncio.to_thread(process.__enter__)
        try:
            with tracing_to(collector.url):
                async with engine_of(server.url, renderer) as engine:
                    await engine.load_weights(checkpoints[0], policy_version=1)
                    with episode_span("traced", {}), span("generate"):
                        await engine.generate(Conversation(renderer, noise_png, 400).ask())
            for _ in range(300):
                if not served(collector):
                    await asyncio.sleep(0.1)
        finally:
            await asyncio.to_thread(process.__exit__, None, None, None)
        print(sorted(collector.tree("traced")))
    assert served(collector)


def served(collector: Collector) -> list[str]:
    """The server's spans below the engine's."""
    return [path for path in collector.tree("traced") if path.startswith("episode/generate/")]


@pytest.fixture(scope="module")
def sharp(checkpoints: tuple[Path, Path]) -> Path:
    """The first checkpoint with logits as large as a trained model's, where bfloat16 has steps of up to 0.25."""
    folder = checkpoints[0].with_name("sharp")
    shutil.copytree(checkpoints[0], folder)
    model = load_model(folder)
    with torch.no_grad():
        model.model.language_model.norm.weight.fill_(25.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


async def test_in_bfloat16_a_server_differs_less_from_the_trainer_with_float32_logits(
    sharp: Path, renderer: Renderer, noise_png: Noise
) -> None:
    model = load_model(sharp, dtype="bfloat16", is_frozen=True)
    means: list[float] = []
    for arguments in ((), ("--enable-fp32-lm-head",)):
        diffs: list[float] = []
        with sglang_process(sharp, "--dtype", "bfloat16", *arguments) as server:
            async with engine_of(server.url, renderer) as engine:
                await engine.load_weights(sharp, policy_version=1)
                for seed in range(12):
                    # At temperature 1 the tiny model is certain of each token: log-probabilities are 0 in any dtype.
                    request = Conversation(renderer, noise_png, seed).ask(temperature=5.0, max_new_tokens=24)
                    diffs += differences(model, renderer, request, await engine.generate(request))
        means.append(sum(diffs) / len(diffs))
        print(f"{arguments}: mean difference {means[-1]:.2g}, {len(diffs)} tokens", file=sys.stderr)
    assert means[1] < 0.85 * means[0]
