"""Samples in process with transformers: requests that wait together are generated together, left-padded.

The reported log-probabilities are those of the raw logits. Temperature, top-p and a short list of ids that may never be
sampled (image placeholders, rows of the embedding beyond the vocabulary) shape the choice alone.

Shapes: B requests in a batch, T prompt tokens of the longest, V vocabulary.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from osworld_pipeline.agent.model_inputs import PixelCache, build_model_inputs
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult

Result = TypeVar("Result")
MIN_BATCH_WAIT_S = 0.005
"""How long the first request of a batch waits for others."""


@dataclass(kw_only=True)
class _Waiting:
    request: GenerateRequest
    future: "asyncio.Future[GenerateResult]"


@dataclass(kw_only=True)
class _Row:
    """One request while it is being sampled."""

    sampling: SamplingParams
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class TransformersEngine:
    name = "transformers"

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        device: torch.device | str = "cpu",
        policy_version: int = 0,
        max_batch: int = 16,
        timeout_s: float = 120.0,
        num_threads: int = 1,
        cache: PixelCache | None = None,
    ) -> None:
        """Use it from one event loop. `model` may be the trainer's own object: nothing is sampled while
        `load_weights` or a trainer's update runs, as long as the trainer awaits its rollouts first.

        `num_threads`: of torch while it samples. Desktops share the machine, and threads that spin for a busy core
        make a token take a hundred times as long; a small model gains nothing from the second thread.
        """
        self._model = model
        self._processor = processor
        self._renderer = Renderer(processor)
        self._device = torch.device(device)
        self._version = policy_version
        self._max_batch = max_batch
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._cache = cache or PixelCache()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = False
        self._eos_ids = frozenset({self._renderer.im_end_id, processor.tokenizer.pad_token_id})
        self._banned_V = self._banned_ids()

    @property
    def policy_version(self) -> int:
        return self._version

    def mark_updated(self, *, policy_version: int) -> None:
        """The weights of `model` were changed in place by whoever trains it."""
        self._version = policy_version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self._is_closed:
            raise EngineError("the transformers engine is closed")
        try:
            async with asyncio.timeout(self._timeout_s):
                # Checked alone first: one malformed request must not fail the batch it would join.
                await asyncio.to_thread(self._check, request)
                waiting = _Waiting(request=request, future=asyncio.get_running_loop().create_future())
                self._queue.put_nowait(waiting)
                if self._worker is None or self._worker.done():
                    self._worker = asyncio.create_task(self._serve())
                return await waiting.future
        except TimeoutError as error:
            raise EngineError(f"the transformers engine gave no response within {self._timeout_s:g} s") from error

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        """Weights of a checkpoint folder into the model in place, between two batches."""
        await self._in_engine_thread(lambda: self._load(path))
        self._version = policy_version

    async def close(self) -> None:
        self._is_closed = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        while not self._queue.empty():
            waiting = self._queue.get_nowait()
            if not waiting.future.done():
                waiting.future.set_exception(EngineError("the transformers engine was closed"))
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(MIN_BATCH_WAIT_S)
            while len(batch) < self._max_batch and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            # Whoever gave up waiting (a timeout, a cancelled episode) needs no answer.
            batch = [waiting for waiting in batch if not waiting.future.done()]
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: list[_Waiting]) -> None:
        requests = [waiting.request for waiting in batch]
        try:
            results = await self._in_engine_thread(lambda: self._generate(requests))
        except asyncio.CancelledError:
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(EngineError("the transformers engine was closed"))
            raise
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(EngineError(f"generation failed: {reason}"))
            return
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.future.done():
                waiting.future.set_result(result)

    async def _in_engine_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _check(self, request: GenerateRequest) -> None:
        try:
            build_model_inputs(self._processor, [(request.token_ids, request.images)], cache=self._cache)
        except ValueError as error:
            raise EngineError(f"the request is malformed: {error}") from error

    def _load(self, path: Path) -> None:
        try:
            fresh = type(self._model).from_pretrained(path, dtype=self._model.dtype)
            self._model.load_state_dict(fresh.state_dict())
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineError(f"cannot load the weights at {path}: {str(error).splitlines()[0]}") from error

    def _banned_ids(self) -> torch.Tensor:
        config = self._model.config
        banned_V = torch.zeros(config.text_config.vocab_size, dtype=torch.bool)
        banned_V[len(self._processor.tokenizer) :] = True
        banned_V[[config.image_token_id, config.video_token_id]] = True
        return banned_V

    def _generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        was_training = self._model.training
        num_threads = torch.get_num_threads()
        self._model.eval()
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                rows = self._sample(requests)
        finally:
            torch.set_num_threads(num_threads)
            self._model.train(was_training)
        return [
            GenerateResult(
                token_ids=tuple(row.token_ids),
                logprobs=tuple(row.logprobs),
                text=self._renderer.decode_response(row.token_ids),
                policy_version=self._version,
                finish_reason=row.finish_reason,
            )
            for row in rows
        ]

    def _sample(self, requests: Sequence[GenerateRequest]) -> list[_Row]:
        arrays = build_model_inputs(
            self._processor,
            [(request.token_ids, request.images) for request in requests],
            padding_side="left",
            cache=self._cache,
        )
        inputs = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        attention_BT = inputs["attention_mask"]
        # Positions are computed here, not by forward: there they hang on state that the last call left in the model.
        positions_3BT, deltas_B1 = self._model.model.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs.pop("mm_token_type_ids"),
            image_grid_thw=inputs.get("image_grid_thw"),
            attention_mask=attention_BT,
        )
        rows = [
            _Row(sampling=request.sampling, generator=torch.Generator().manual_seed(request.sampling.seed))
            for request in requests
        ]
        outputs = self._model(**inputs, position_ids=positions_3BT, use_cache=True, logits_to_keep=1)
        for _ in range(max(row.sampling.max_new_tokens for row in rows)):
            next_B = self._choose(rows, outputs.logits[:, -1].float().cpu())
            if all(row.finish_reason for row in rows):
                break
            next_position_B1 = attention_BT.sum(dim=1, keepdim=True) + deltas_B1
            attention_BT = torch.cat([attention_BT, attention_BT.new_ones(len(rows), 1)], dim=1)
            outputs = self._model(
                input_ids=next_B[:, None].to(self._device),
                attention_mask=attention_BT,
                position_ids=next_position_B1.expand(3, -1, -1),
                past_key_values=outputs.past_key_values,
                use_cache=True,
            )
        return rows

    def _choose(self, rows: Sequence[_Row], logits_BV: torch.Tensor) -> torch.Tensor:
        """Samples one token for each row that still runs; finished rows are fed their end and ignored."""
        next_B = torch.full((len(rows),), self._renderer.im_end_id, dtype=torch.long)
        logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
        for index, row in enumerate(rows):
            if row.finish_reason:
                continue
            token_id = choose_token(
                logits_BV[index].masked_fill(self._banned_V, -torch.inf), row.sampling, row.generator
            )
            next_B[index] = token_id
            row.token_ids.append(token_id)
            row.logprobs.append(float(logprobs_BV[index, token_id]))
            if token_id in self._eos_ids or self._ends_at_stop(row):
                row.finish_reason = "stop"
            elif len(row.token_ids) >= row.sampling.max_new_tokens:
                row.finish_reason = "length"
        return next_B

    def _ends_at_stop(self, row: _Row) -> bool:
        stops = row.sampling.stop
        if not stops:
            return False
        # A token is at least one byte, so a stop string of n bytes lies within the last n tokens.
        window = max(len(stop.encode()) for stop in stops)
        tail = self._renderer.decode_response(row.token_ids[-window:])
        return any(stop in tail for stop in stops)


def choose_token(logits_V: torch.Tensor, sampling: SamplingParams, generator: torch.Generator) -> int:
    """Greedy at temperature 0; else a sample of the smallest set of tokens whose probability reaches top_p."""
    if sampling.temperature <= 0:
        return int(logits_V.argmax())
    probs_V = torch.softmax(logits_V / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        sorted_V, order_V = probs_V.sort(descending=True, stable=True)
        # A token stays while the probability before it is below top_p: the first always does.
        kept_V = sorted_V.cumsum(dim=-1) - sorted_V < sampling.top_p
        probs_V = torch.zeros_like(probs_V).scatter(0, order_V, sorted_V * kept_V)
    return int(torch.multinomial(probs_V, 1, generator=generator))
