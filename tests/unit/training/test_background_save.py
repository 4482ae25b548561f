"""A checkpoint is written while training continues: what it holds, what waits for it, and how it fails."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import make_trainer, trainer_state
from training_samples import conversation

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.training import distributed_trainer
from osworld_pipeline.training.background import Background
from osworld_pipeline.training.sft import SftTrainer
from osworld_pipeline.training.weights import manifest
from osworld_pipeline.training.weights.checkpoint import (
    keep_milestone,
    latest_complete,
    load_optimizer,
    remove_stale_writes,
    save_final,
    save_partial,
)
from osworld_pipeline.training.weights.manifest import build_manifest, file_digests, verify_checkpoint
from osworld_pipeline.training.weights.weights_digest import weights_digest

LIMIT_S = 30


class Gate:
    """Blocks the writing thread before it writes anything."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self._write = distributed_trainer.save_optimizer

    def __call__(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        self._write(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate()
    monkeypatch.setattr(distributed_trainer, "save_optimizer", found)
    yield found
    found.opened.set()


def update(trainer: SftTrainer, number: int) -> None:
    trainer.update([conversation(trainer.processor, number)])


def weights(trainer: SftTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def test_training_continues_while_a_checkpoint_is_written_with_the_state_at_the_save(
    tmp_path: Path, tiny_folder: Path, gate: Gate
) -> None:
    state, trainer = StateDir(tmp_path), make_trainer(tiny_folder)
    update(trainer, 0)
    before = weights(trainer)
    moments = {name: tensor.clone() for name, tensor in trainer.optimizer.state_dict().items()}
    save_partial(state, trainer, trainer_state(1))
    assert gate.reached.wait(LIMIT_S)
    update(trainer, 1)
    assert latest_complete(state, "sft-1") is None
    gate.opened.set()
    trainer.close()
    folder = latest_complete(state, "sft-1")
    assert folder is not None
    verify_checkpoint(folder, is_required=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in load_file(folder / "model.safetensors").items())
    assert not torch.equal(before["lm_head.weight"], trainer.model.lm_head.weight)
    resumed = make_trainer(folder)
    ranked_state = resumed.optimizer.state_dict()
    load_optimizer(folder, ranked_state)
    assert all(torch.equal(moments[name], tensor) for name, tensor in ranked_state.items())


def test_saves_wait_for_earlier_saves_and_so_does_the_final_one(tmp_path: Path, tiny_folder: Path, gate: Gate) -> None:
    state, trainer = StateDir(tmp_path), make_trainer(tiny_folder)
    save_partial(state, trainer, trainer_state(1))
    assert gate.reached.wait(LIMIT_S)
    second = threading.Thread(target=save_partial, args=(state, trainer, trainer_state(2)))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.opened.set()
    second.join(LIMIT_S)
    folder = save_final(state, trainer, trainer_state(3))
    assert [path.name for path in state.checkpoints.iterdir()] == [folder.name]


def test_a_milestone_is_kept_once_its_checkpoint_is_whole(tmp_path: Path, tiny_folder: Path, gate: Gate) -> None:
    state, trainer = StateDir(tmp_path), make_trainer(tiny_folder)
    keep = partial(keep_milestone, state, name="sft-1-u0001", documents=lambda _: {"checkpoint.json": {}})
    save_partial(state, trainer, trainer_state(1), then=keep)
    assert gate.reached.wait(LIMIT_S)
    assert not (state.checkpoints / "sft-1-u0001").exists()
    gate.opened.set()
    trainer.wait_saved()
    verify_checkpoint(state.checkpoints / "sft-1-u0001", is_required=True)


def test_a_failed_checkpoint_write_is_raised_by_the_next_update(tmp_path: Path, tiny_folder: Path, gate: Gate) -> None:
    state, trainer = StateDir(tmp_path), make_trainer(tiny_folder)
    gate.error = OSError(28, "No space left on device")
    gate.opened.set()
    save_partial(state, trainer, trainer_state(1))
    trainer._saving._thread.join(LIMIT_S)  # type: ignore[union-attr]
    with pytest.raises(StoreError, match=r"no disk space left to write .*update-0001"):
        update(trainer, 0)
    assert list(state.checkpoints.glob("*/*")) == []
    update(trainer, 0)


def test_closing_waits_for_the_write_and_raises_its_error(tmp_path: Path, tiny_folder: Path, gate: Gate) -> None:
    trainer = make_trainer(tiny_folder)
    gate.error = OSError(5, "Input/output error")
    save_partial(StateDir(tmp_path), trainer, trainer_state(1))
    gate.opened.set()
    with pytest.raises(StoreError, match=r"cannot write the checkpoint .*Input/output error"):
        trainer.close()


def test_a_trainer_killed_while_it_writes_leaves_the_previous_checkpoint(tmp_path: Path, tiny_folder: Path) -> None:
    program = (
        "import sys, threading, time; from pathlib import Path\n"
        "from test_checkpoint import StateDir, make_trainer, save, save_partial, trainer_state\n"
        "from osworld_pipeline.training import distributed_trainer\n"
        "trainer, state = make_trainer(Path(sys.argv[1])), StateDir(Path(sys.argv[2]))\n"
        "save(state, trainer, 1)\n"
        "distributed_trainer.write_documents = lambda *_: (print('writing', flush=True), time.sleep(60))\n"
        "save_partial(state, trainer, trainer_state(2))\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", program, str(tiny_folder), str(tmp_path)]
    child = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=10)
    state = StateDir(tmp_path)
    assert remove_stale_writes(state, "sft-1") == 1
    newest = latest_complete(state, "sft-1")
    assert newest is not None
    assert newest.name == "update-0001"
    verify_checkpoint(newest, is_required=True)


def test_a_failure_of_background_work_is_raised_once() -> None:
    background = Background("a test")

    def fail() -> None:
        raise StoreError("no")

    background.start(fail)
    with pytest.raises(StoreError, match="no"):
        background.wait()
    background.check()
    background.wait()


def test_digests_are_those_of_the_bytes_for_many_files(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * (number * 1000))
    digests = file_digests(sorted(tmp_path.iterdir()))
    assert digests == {path: sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}


def test_a_large_file_is_read_once_for_the_card_and_the_manifest_and_again_to_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MIN_KNOWN_BYTES", 10)
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)
    read: list[str] = []
    digest = manifest._digest

    def counted(path: Path) -> str:
        read.append(path.name)
        return digest(path)

    monkeypatch.setattr(manifest, "_digest", counted)
    own = weights_digest(tmp_path)
    written = build_manifest(tmp_path, {})
    assert written["files"]["model.safetensors"]["sha256"] == own == sha256(b"w" * 1000).hexdigest()
    assert read == ["model.safetensors"]
    (tmp_path / "manifest.json").write_text(json.dumps(written))
    verify_checkpoint(tmp_path)
    assert read == ["model.safetensors"] * 2
