"""Samples in process with transformers, in a separate thread: waiting requests are batched, and in `append` mode an
episode's keys and values are kept between its turns, so that a turn processes only its new tokens.

The reported log-probabilities are those of the sampling distribution, as defined in protocols.GenerateResult. In
float32 on a CPU a response is bit-identical in any batch; elsewhere it is equal up to rounding.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from osworld_pipeline.agent.model_inputs import PixelCache, check_placeholders
from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.engines.transformers_cache import KeptEpisodes
from osworld_pipeline.rollout.engines.transformers_sampler import Progress, Row, Sampler, generation_error
from osworld_pipeline.rollout.engines.transformers_weights import check_state, copy_state, read_weights

Result = TypeVar("Result")
NUM_ENCODERS = 2
"""Threads that turn images into patches, outside the event loop and the engine's thread."""
CPU_KV_BYTES = 1 << 30
CLOSE_TIMEOUT_S = 10.0


class TransformersEngine:
    name = "transformers"
    uses_chat_api = False

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
        reuse_kv_cache: bool = True,
        kv_cache_bytes: int | None = None,
        cache: PixelCache | None = None,
        base_folder: Path | None = None,
    ) -> None:
        """Use it from one event loop. `model` may be the trainer's own object as long as the trainer awaits its
        rollouts before an update and calls `mark_updated` after it; or a copy, updated by `load_state`.

        `num_threads`: torch threads in the engine's thread. Desktops share the machine, and threads that busy-wait for
        an occupied core make sampling a hundred times slower; a small model gains nothing from a second thread.
        `kv_cache_bytes`: limit of the keys and values kept between turns, with LRU eviction; None for 1 GiB on a CPU
        and a quarter of an accelerator's free memory. `base_folder`: where the model's whole weights were read;
        adapters of other bases are refused.
        """
        self._processor = processor
        self._model = model
        self._timeout_s = timeout_s
        self._version = policy_version
        self._cache = cache or PixelCache()
        self._base_folder = base_folder
        device = torch.device(device)
        max_bytes = _default_kv_bytes(device) if kv_cache_bytes is None else kv_cache_bytes
        self._kept = KeptEpisodes(max_bytes=max_bytes) if reuse_kv_cache else None
        self._sampler = Sampler(
            model,
            Renderer(processor),
            device=device,
            policy_version=policy_version,
            max_batch=max_batch,
            kept=self._kept,
        )
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="engine", initializer=_set_own_threads, initargs=(num_threads,)
        )
        self._encoders = ThreadPoolExecutor(max_workers=NUM_ENCODERS, thread_name_prefix="images")
        self._inbox: list[Row | Callable[[], None]] = []
        self._is_draining = False
        self._is_closed = False
        self._lock = threading.Lock()
        """Guards the three fields above."""
        self._open: set[Future[Any]] = set()

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def model(self) -> Any:
        """The model that it samples from; do not change it."""
        return self._model

    @property
    def num_kept_bytes(self) -> int:
        """Size of keys and values kept between turns."""
        return 0 if self._kept is None else self._kept.num_bytes

    def mark_updated(self, *, policy_version: int) -> None:
        """The trainer has changed the weights of `model` in place."""
        self._version = policy_version
        self._post(lambda: self._sampler.forget_weights(policy_version=policy_version))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check_open()
        try:
            async with asyncio.timeout(self._timeout_s):
                future: Future[GenerateResult] = Future()
                row = await asyncio.get_running_loop().run_in_executor(self._encoders, self._prepare, request, future)
                return await self._answer(row, future)
        except TimeoutError as error:
            raise EngineError(f"the transformers engine gave no response within {self._timeout_s:g} s") from error

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        """Loads the weights of a checkpoint folder into the model in place; of an adapter checkpoint only its factors.
        They are read while sampling continues. Raises EngineError, also if an adapter does not belong to the model."""
        self._check_open()
        tensors = await asyncio.to_thread(read_weights, path, model=self._model, base_folder=self._base_folder)
        await self.load_state(tensors, policy_version=policy_version, source=path)

    async def load_state(
        self, state_dict: Mapping[str, torch.Tensor], *, policy_version: int, source: Path | str = "a state dict"
    ) -> None:
        """Copies weights (all, or an adapter's factors) into the model in place, between two tokens. Responses in
        progress continue with the new weights and record the version of each token. The tensors must not change before
        this returns.

        Raises:
            EngineError: a tensor is missing or has another shape, and then nothing was changed; names it and `source`.
        """
        self._check_open()
        try:
            tensors = check_state(self._model, state_dict)
        except ValueError as error:
            raise EngineError(f"cannot load the weights of {source}: {error}") from error
        future: Future[None] = Future()

        def load() -> None:
            copy_state(self._model, tensors)
            self._sampler.forget_weights(policy_version=policy_version)
            _settle(future, None)

        await self._answer(load, future)
        self._version = policy_version

    async def forget(self, episode_id: str) -> None:
        if self._kept is not None:
            self._kept.forget(episode_id)

    async def health(self) -> None:
        self._check_open()

    async def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for future in list(self._open):
            _settle(future, EngineError("the transformers engine was closed"))
        self._encoders.shutdown(wait=False, cancel_futures=True)
        stopped = asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
        try:
            await asyncio.wait_for(stopped, CLOSE_TIMEOUT_S)
        except TimeoutError:
            return  # the thread ends after its current forward pass
        if self._kept is not None:
            self._kept.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the transformers engine is closed")

    async def _answer(self, item: Row | Callable[[], None], future: "Future[Result]") -> Result:
        self._open.add(future)
        try:
            self._post(item)
            return await asyncio.wrap_future(future)
        finally:
            self._open.discard(future)

    def _prepare(self, request: GenerateRequest, future: "Future[GenerateResult]") -> Row:
        """Validated separately, so that a malformed request does not fail others."""
        kept = self._kept.find(request) if self._kept is not None and request.episode_id else None
        num_known = 0 if kept is None else len(kept.images)
        known = () if kept is None else kept.grids
        try:
            encoded = [self._cache.pixel_values(self._processor, image) for image in request.images[num_known:]]
            grids = (*known, *(grid for _, grid in encoded))
            check_placeholders(self._processor, 0, request.token_ids, grids)
            self._check_ids(request)
        except (ValueError, OSError) as error:
            raise EngineError(f"the request is malformed: {error}") from error
        return Row(
            request=request,
            future=future,
            grids=grids,
            pixels=[*[None] * num_known, *(patches for patches, _ in encoded)],
            generator=torch.Generator().manual_seed(request.sampling.seed),
        )

    def _check_ids(self, request: GenerateRequest) -> None:
        """An id outside the embedding crashes the process on an accelerator."""
        vocab_size = self._model.config.text_config.vocab_size
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {vocab_size}")

    def _complete(self, row: Row) -> None:
        """The row's cached episode is gone: its prompt is read completely, which needs all pixels."""
        try:
            row.pixels = [self._cache.pixel_values(self._processor, image)[0] for image in row.request.images]
            self._post(row)
        except Exception as error:  # noqa: BLE001 - this thread's future is not read: the row's must fail
            _settle(row.future, generation_error(error))

    def _post(self, item: Row | Callable[[], None]) -> None:
        with self._lock:
            self._check_open()
            self._inbox.append(item)
            if self._is_draining:
                return
            self._is_draining = True
            self._executor.submit(self._drain)

    def _take(self) -> list[Row | Callable[[], None]] | None:
        """Returns the incoming items; None if there is no work left."""
        with self._lock:
            items, self._inbox = self._inbox, []
            if self._is_closed or (not items and self._sampler.is_idle):
                self._is_draining = False
                return None
            return items

    def _drain(self) -> None:
        """Runs in the engine's thread until no request waits."""
        while (items := self._take()) is not None:
            try:
                for item in items:
                    if isinstance(item, Row):
                        self._sampler.add(item)
                    else:
                        item()
                progress = self._sampler.advance()
            except Exception as error:  # noqa: BLE001 - a bug fails waiting requests, later ones are answered
                progress = self._sampler.fail_all(generation_error(error))
                for item in items:
                    if isinstance(item, Row):
                        _settle(item.future, generation_error(error))
            self._deliver(progress)

    def _deliver(self, progress: Progress) -> None:
        for row, result in progress.done:
            _settle(row.future, result)
        for row in progress.unprepared:
            try:
                self._encoders.submit(self._complete, row)
            except RuntimeError:  # it is closed
                _settle(row.future, EngineError("the transformers engine was closed"))


def _settle(future: "Future[Any]", result: Any) -> None:
    """A caller that no longer waits (timeout, cancelled episode) needs no answer."""
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass


def _set_own_threads(num_threads: int) -> None:
    """Sets the number of torch threads in this thread only. Torch also records it for future threads, so another thread
    restores the previous number: a trainer's thread must not inherit the engine's."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
    restoring.start()
    restoring.join()


def _default_kv_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_KV_BYTES
    num_free, _ = torch.cuda.mem_get_info(device)
    return num_free // 4
