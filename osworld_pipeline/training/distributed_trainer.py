"""A trainer on several ranks: the program calls rank 0, and the others execute the commands that it sends."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from osworld_pipeline.agent.adapters import FOLDER, Base
from osworld_pipeline.agent.model_inputs import PixelCache
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import EngineError, PipelineError, TrainingError
from osworld_pipeline.recipes.schema import TrainerSection
from osworld_pipeline.training.background import Background
from osworld_pipeline.training.batch import Batch, build_batch
from osworld_pipeline.training.between_passes import Arrivals, BetweenPasses, Consume
from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed.sharding import (
    each_weight,
    gather_trained,
    gather_weights,
    host_copies,
    host_weights,
)
from osworld_pipeline.training.distributed.shared_trajectories import ReadImage, share_trajectories
from osworld_pipeline.training.micro_batches import MicroBatch, make_micro_batches
from osworld_pipeline.training.objective.score import device_of, score_trajectories, training_mode
from osworld_pipeline.training.optimizer import MasterAdamW
from osworld_pipeline.training.weights import lora
from osworld_pipeline.training.weights.checkpoint import Documents, save_optimizer, write_documents, writing_folder

MODEL_CONFIG_FILE = "config.json"


class DistributedTrainer:
    """Implements protocols.PolicyTrainer. On rank 0 call `update`, `save`, `wait_saved`, `save_weights`,
    `send_weights`, `weights` and `close`; on any other rank call `run_worker`."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        optimizer: MasterAdamW,
        *,
        section: TrainerSection | None,
        process_group: ProcessGroup | None,
        num_updates: int,
        cache: PixelCache | None,
        base: Base | None,
        banned_ids: Sequence[int] = (),
    ) -> None:
        """`base`: the frozen weights under LoRA's adapters; rank 0 needs it to save. `banned_ids`: ids that the policy
        never samples, for training on its samples."""
        self.model = model
        self.processor = processor
        self.optimizer = optimizer
        self.num_updates = num_updates
        self.process_group = process_group or ProcessGroup.alone(device_of(model))
        self._section = section or TrainerSection()
        self._cache = cache or PixelCache()
        self._base = base
        self._banned_ids = tuple(banned_ids)
        self.read_image: ReadImage | None = None
        """Reads stored screenshots on this rank; None if rank 0 sends all of them."""
        self._saving = Background("the writing of a checkpoint")
        self._save_group: Any = None

    @property
    def shares_weights(self) -> bool:
        """Whether `model` is unsharded, so that an engine in this process may sample from it directly."""
        return self.process_group.is_alone

    def update(self, trajectories: Sequence[Trajectory], arrivals: Arrivals | None = None) -> dict[str, float]:
        """One update on rank 0's trajectories; returns its metrics. `arrivals`: the receivers of the weights, and the
        canaries, that arrive while the batch is scored; the weights change only after the canaries have arrived.

        Raises:
            TrainingError: trainer and sampler disagree, a loss or gradient is not finite, a trajectory is malformed, or
                another rank failed.
            StoreError: the last checkpoint could not be written.
            As Arrivals.next.
        """
        with self._together("update"):
            self._saving.check()
            shared = share_trajectories(trajectories, self.process_group, self.read_image)
            metrics = self._update(shared, BetweenPasses(self.process_group, self._send, arrivals))
            self.num_updates += 1
            return metrics

    def save(
        self, folder: Path, documents: Mapping[str, Any] | Documents, *, then: Callable[[Path], object] | None = None
    ) -> None:
        """Starts to write a checkpoint to `folder` atomically: weights and optimiser are copied to host memory, and a
        thread writes them while training continues. `then` is called in that thread with the complete folder. Only one
        save runs at a time: this waits for the previous one.

        Raises:
            StoreError: this save cannot start, or the previous one failed.
        """
        with self._together("save"):
            self._saving.wait()
            if self._save_group is None:
                self._save_group = self.process_group.open_group()
            state = host_copies(self.optimizer.state_dict())
            weights = host_weights(self.model, self._gathered())
            if self.process_group.is_main:
                self._begin_save(folder, documents, weights, state, then)
            else:
                temp = self.process_group.broadcast()
                self._saving.start(partial(_save_share, temp, state, self._save_group))

    def _begin_save(
        self,
        folder: Path,
        documents: Mapping[str, Any] | Documents,
        weights: dict[str, torch.Tensor],
        state: dict[str, torch.Tensor],
        then: Callable[[Path], object] | None,
    ) -> None:
        with ExitStack() as undo:
            temp, opened = self._open_folder(folder)
            undo.enter_context(opened)
            self.process_group.broadcast(temp)
            undo.pop_all()

        def write() -> None:
            with opened:
                self._save_optimizer(temp, state)
                self._save_weights(temp, folder, weights)
                write_documents(temp, documents)
            if then is not None:
                then(folder)

        self._saving.start(write)

    def _open_folder(self, folder: Path) -> tuple[Path, ExitStack]:
        """A folder with the processor's files that takes the place of `folder` when the stack ends."""
        with ExitStack() as opening:
            temp = opening.enter_context(writing_folder(folder))
            # Here and not in a thread that writes weights: a tokenizer must not be read while the trainer uses it.
            self.processor.save_pretrained(temp)
            return temp, opening.pop_all()

    def _save_optimizer(self, temp: Path, state: dict[str, torch.Tensor]) -> None:
        try:
            save_optimizer(temp, state, self._save_group)
        except RuntimeError as error:
            if self.process_group.is_lost(error):
                raise TrainingError(self.process_group.explain(error, "a save")) from error
            raise

    def wait_saved(self) -> None:
        """Waits until the last checkpoint is complete. Raises StoreError."""
        self._saving.wait()

    def save_weights(self, folder: Path) -> Callable[[], None]:
        """Begins to save the part of a checkpoint that an engine loads: everything except the optimiser. The returned
        function writes it, in any thread; the weights must not change before it returns. Both raise StoreError."""
        with self._together("save_weights"):
            weights = self._gathered()
            if not self.process_group.is_main:
                return lambda: None
            temp, opened = self._open_folder(folder)

        def write() -> None:
            with opened:
                self._save_weights(temp, folder, weights)

        return write

    def weights(self) -> dict[str, torch.Tensor]:
        """The policy's full weights, as an engine loads them; under LoRA only the adapter's factors. Empty on the
        other ranks. With `shares_weights` they are the model's own tensors, else copies in host memory."""
        with self._together("weights"):
            return self._gathered()

    def send_weights(self, consume: Consume | None) -> None:
        """Gathers all weights tensor by tensor and passes them to rank 0's `consume`, which is None on the other ranks.
        An EngineError of `consume` leaves the trainer as it was, and is raised again."""
        with self._together("send_weights"):
            failed = self._send(consume)
        if failed is not None:
            raise failed

    @property
    def num_weight_bytes(self) -> int:
        """Size of all weights together."""
        return sum(param.numel() * param.element_size() for param in self.model.parameters())

    def close(self) -> None:
        """Waits for the last checkpoint. Raises StoreError."""
        try:
            self._saving.wait()
        finally:
            with self._together("close"):
                pass

    def run_worker(self) -> None:
        """Executes rank 0's commands on another rank until rank 0 closes."""
        while True:
            command = self.process_group.next_command()
            if command == "update":
                self.update(())
            elif command == "save":
                self.save(Path(), {})
            elif command == "save_weights":
                self.save_weights(Path())
            elif command == "send_weights":
                self.send_weights(None)
            elif command == "weights":
                self.weights()
            else:
                self._saving.wait()
                return

    def _update(self, trajectories: Sequence[Trajectory], breaks: BetweenPasses) -> dict[str, float]:
        raise NotImplementedError

    def _send(self, consume: Consume | None) -> EngineError | None:
        """`consume`: rank 0's receiver. Returns its error."""
        failed, weights = None, each_weight(self.model)
        if consume is not None:
            try:
                consume(weights)
            except EngineError as error:
                failed = error
        for _ in weights:  # every rank takes part in every gathering
            pass
        self.process_group.gather(None)
        return failed

    def _passes(
        self, trajectories: Sequence[Trajectory], *, max_sequences: int | None
    ) -> Iterator[tuple[MicroBatch, Batch]]:
        """This rank's forward passes; their images are loaded on use."""
        rounds = make_micro_batches(
            trajectories,
            num_ranks=self.process_group.world_size,
            max_tokens=self._section.max_tokens_per_batch,
            max_sequences=max_sequences,
            is_packed=self._is_packed,
        )
        for micro_batches in rounds:
            micro_batch = micro_batches[self.process_group.rank]
            yield micro_batch, self._batch(micro_batch.trajectories)

    @contextmanager
    def _training(self, *, seed: int) -> Iterator[None]:
        has_dropout = self._section.lora is not None and self._section.lora.dropout > 0
        dropout_seed = seed * 1_000_003 + self.num_updates * 1_009 + self.process_group.rank
        with training_mode(self.model, dropout_seed=dropout_seed if has_dropout else None):
            yield

    def _batch(self, trajectories: Sequence[Trajectory]) -> Batch:
        return build_batch(
            self.processor,
            trajectories,
            cache=self._cache,
            device=self.process_group.device,
            is_packed=self._is_packed,
            banned_ids=self._banned_ids,
        )

    def _score(
        self,
        model: Any,
        trajectories: Sequence[Trajectory],
        *,
        max_sequences: int | None = None,
        as_parent: bool = False,
        before_pass: Callable[[], None] | None = None,
    ) -> list[Any]:
        with lora.as_parent(model) if as_parent else nullcontext():
            return score_trajectories(
                model,
                self.processor,
                trajectories,
                cache=self._cache,
                max_tokens=self._section.max_tokens_per_batch,
                max_sequences=max_sequences,
                is_packed=self._is_packed,
                process_group=self.process_group,
                before_pass=before_pass,
            )

    @property
    def _is_packed(self) -> bool:
        return self._section.batching == "packed"

    def _gathered(self) -> dict[str, torch.Tensor]:
        if self._section.lora is None:
            return gather_weights(self.model)
        return gather_trained(self.model, self.process_group)

    def _save_weights(self, temp: Path, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        section = self._section.lora
        if section is None:
            self.model.save_pretrained(temp, state_dict=weights)
        else:
            assert self._base is not None, "adapters are saved with a reference to their base"
            place = folder / FOLDER
            lora.save_adapter(temp / FOLDER, self.model, weights, section, self._base, place=place)
            shutil.copyfile(self._base.folder / MODEL_CONFIG_FILE, temp / MODEL_CONFIG_FILE)

    @contextmanager
    def _together(self, command: str) -> Iterator[None]:
        """All ranks run the block; if one fails, it publishes its error and the other ranks exit."""
        if self.process_group.is_main:
            self.process_group.send_command(command)
        try:
            yield
        except PipelineError as error:
            self.process_group.report_error(str(error))
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError) and self.process_group.is_lost(error):
                raise TrainingError(self.process_group.explain(error, command)) from error
            self.process_group.report_error(f"{type(error).__name__}: {error}")
            raise


def _save_share(temp: Path, state: dict[str, torch.Tensor], group: Any) -> None:
    """Saves a rank's part of the optimiser. Rank 0 receives and reports the errors of all ranks."""
    with suppress(CheckpointException):
        save_optimizer(temp, state, group)
