import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from training_samples import conversation

from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.checkpoint import Ancestor, milestone_id
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError, TrainingError
from osworld_pipeline.recipes.schema import SftSection
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.sft import SftTrainer
from osworld_pipeline.training.weights.checkpoint import (
    TrainerState,
    keep_milestone,
    latest_complete,
    partials_dir,
    read_trainer_state,
    remove_stale_writes,
    save_final,
    save_partial,
    write_folder,
    writing_folder,
)
from osworld_pipeline.training.weights.manifest import verify_checkpoint
from osworld_pipeline.training.weights.stage_lock import stage_lock
from osworld_pipeline.training.weights.weights_digest import weights_digest

SETTINGS = SftSection(num_updates=6, batch_size=2, learning_rate=1e-3, warmup_updates=1)


def trainer_state(num_updates: int) -> TrainerState:
    return TrainerState(
        checkpoint_id="sft-1",
        parent_id="base-1",
        num_updates=num_updates,
        recipe={"name": "tiny"},
        data_digest="d",
        metrics={"loss": 1.5},
    )


def make_trainer(folder: Path) -> SftTrainer:
    return SftTrainer(load_model(folder), load_processor(folder), SETTINGS)


def save(state: StateDir, trainer: SftTrainer, num_updates: int, *, keep_last: int = 2) -> Path:
    folders: list[Path] = []
    save_partial(state, trainer, trainer_state(num_updates), keep_last=keep_last, then=folders.append)
    trainer.wait_saved()
    return folders[0]


def test_the_newest_partial_checkpoint_is_found_and_two_are_kept(tmp_path: Path, tiny_folder: Path):
    state, trainer = StateDir(tmp_path), make_trainer(tiny_folder)
    assert latest_complete(state, "sft-1") is None
    for num_updates in (2, 10, 9):
        save(state, trainer, num_updates)
    kept = sorted(path.name for path in partials_dir(state, "sft-1").iterdir())
    assert kept == ["update-0009", "update-0010"]
    newest = latest_complete(state, "sft-1")
    assert newest is not None
    assert read_trainer_state(newest) == trainer_state(10)


def test_a_milestone_outlives_the_partial_checkpoint_it_was_made_from(tmp_path: Path, tiny_folder: Path):
    state, trainer = StateDir(tmp_path), make_trainer(tiny_folder)
    saved = save(state, trainer, 3, keep_last=1)
    name = milestone_id("sft-1", 3)
    folder = keep_milestone(state, saved, name, lambda folder: {"checkpoint.json": {"digest": weights_digest(folder)}})
    digest = weights_digest(saved)
    save(state, trainer, 4, keep_last=1)
    assert not saved.exists()
    assert folder == state.checkpoints / "sft-1-u0003"
    assert weights_digest(folder) == digest
    assert json.loads((folder / "checkpoint.json").read_text()) == {"digest": digest}
    assert not (folder / "optimizer").exists()
    verify_checkpoint(folder, is_required=True)
    load_model(folder)


def test_the_manifest_records_where_a_checkpoint_comes_from(tmp_path: Path, tiny_folder: Path):
    folder = save(StateDir(tmp_path), make_trainer(tiny_folder), 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["checkpoint_id"], manifest["parent_id"], manifest["num_updates"]) == ("sft-1", "base-1", 2)
    assert (manifest["recipe"], manifest["data_digest"]) == ({"name": "tiny"}, "d")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {"manifest.json"}
    weights = sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert manifest["files"]["model.safetensors"]["sha256"] == weights


@pytest.mark.slow
def test_a_trainer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, tiny_folder: Path):
    program = (
        "import os, sys; from pathlib import Path\n"
        "from test_checkpoint import StateDir, make_trainer, save\n"
        "while sys.stdin.readline():\n"  # each trainer is a fork: the imports take longer than all else
        "    if os.fork() == 0: break\n"
        "    os.wait(); print('ended', flush=True)\n"
        "else: sys.exit()\n"
        "print(os.getpid(), flush=True)\n"
        "trainer, state = make_trainer(Path(sys.argv[1])), StateDir(Path(sys.argv[2]))\n"
        "for number in range(2, 10_000):\n"
        "    save(state, trainer, number // 2)\n"  # every second save replaces an existing checkpoint
        "    print(number, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(tiny_folder), str(tmp_path)]
    state = StateDir(tmp_path)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainers:
        assert trainers.stdin is not None
        assert trainers.stdout is not None
        for attempt in range(2):
            trainers.stdin.write("start\n")
            trainers.stdin.flush()
            pid = int(trainers.stdout.readline())
            for number in range(2, 4 + attempt):
                assert trainers.stdout.readline() == f"{number}\n"
            time.sleep(0.017 * attempt)
            os.kill(pid, signal.SIGKILL)
            assert "ended\n" in iter(trainers.stdout.readline, "")
            remove_stale_writes(state, "sft-1")
            newest = latest_complete(state, "sft-1")
            assert newest is not None
            verify_checkpoint(newest, is_required=True)
            assert not list(partials_dir(state, "sft-1").glob(".*"))


def test_a_checkpoint_that_a_killed_trainer_was_replacing_is_restored(tmp_path: Path):
    state = StateDir(tmp_path)
    parent = partials_dir(state, "sft-1")
    replaced = parent / f".writing-update-0002-{'a' * 32}-old"
    replaced.mkdir(parents=True)
    (replaced / "trainer_state.json").write_text("{}")
    assert remove_stale_writes(state, "sft-1") == 1
    assert latest_complete(state, "sft-1") == parent / "update-0002"


def test_a_final_checkpoint_is_complete_and_the_partial_ones_are_removed(tmp_path: Path, tiny_folder: Path):
    state, trainer = StateDir(tmp_path), make_trainer(tiny_folder)
    save(state, trainer, 2)
    folder = save_final(
        state,
        trainer,
        trainer_state(6),
        documents=lambda temp: {"checkpoint.json": {"weights_digest": weights_digest(temp)}},
    )
    assert folder == state.checkpoints / "sft-1"
    assert [path.name for path in state.checkpoints.iterdir()] == ["sft-1"]
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert {"processor_config.json", "optimizer", "manifest.json", "trainer_state.json", "checkpoint.json"} <= names
    assert sha256((folder / "model.safetensors").read_bytes()).hexdigest() in (folder / "checkpoint.json").read_text()
    load_model(folder)


def test_saving_again_replaces_the_folder(tmp_path: Path, tiny_folder: Path):
    state, trainer = StateDir(tmp_path), make_trainer(tiny_folder)
    save(state, trainer, 2)
    trainer.update([conversation(trainer.processor, 1)])
    folder = save(state, trainer, 2)
    assert torch.equal(load_model(folder).lm_head.weight, trainer.model.lm_head.weight)
    assert [path.name for path in folder.parent.iterdir()] == ["update-0002"]


def test_a_full_disk_is_reported_with_one_sentence_and_no_file_is_left(tmp_path: Path):
    def fill(temp: Path) -> None:
        (temp / "weights").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StoreError, match=r"no disk space left to write .*sft-1: free some space"):
        write_folder(tmp_path / "sft-1", fill)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported_with_one_sentence(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="cannot write the checkpoint"):
        write_folder(tmp_path / "checkpoints" / "sft-1", lambda temp: None)


def test_a_killed_save_keeps_the_old_checkpoint_and_its_incomplete_folder_is_removed(tmp_path: Path):
    state = StateDir(tmp_path)
    with writing_folder(state.checkpoints / "sft-1") as temp:
        (temp / "weights").write_text("old")
    program = (
        "import sys, time; from pathlib import Path\n"
        "from osworld_pipeline.training.weights.checkpoint import write_folder\n"
        "def fill(temp):\n"
        "    (temp / 'weights').write_text('new'); print('filling', flush=True); time.sleep(60)\n"
        "write_folder(Path(sys.argv[1]), fill)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(state.checkpoints / "sft-1")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "filling\n"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=10)
    assert (state.checkpoints / "sft-1" / "weights").read_text() == "old"
    assert len(list(state.checkpoints.iterdir())) == 2
    assert remove_stale_writes(state, "sft-1") == 1
    assert [path.name for path in state.checkpoints.iterdir()] == ["sft-1"]


def test_a_folder_that_another_stage_is_writing_is_not_removed(tmp_path: Path):
    state = StateDir(tmp_path)
    (state.checkpoints / ".writing-sft-22-abc").mkdir(parents=True)
    assert remove_stale_writes(state, "sft-2") == 0


@pytest.mark.parametrize(
    ("needs", "words"), [("9.1.0", r"version 9\.1\.0 or newer"), ("", "the version that wrote it")]
)
def test_a_checkpoint_of_a_newer_format_says_which_version_reads_it(tmp_path: Path, needs: str, words: str):
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 99, "needs": needs, "files": {}}))
    with pytest.raises(StoreError, match=rf"manifest\.json is of format 99, .* install {words}"):
        verify_checkpoint(tmp_path)


def test_a_damaged_trainer_state_says_what_to_remove(tmp_path: Path, tiny_folder: Path):
    folder = save(StateDir(tmp_path), make_trainer(tiny_folder), 2)
    (folder / "trainer_state.json").write_text("{")
    with pytest.raises(StoreError, match=r"trainer_state.json cannot be read .* remove .*update-0002 and run"):
        read_trainer_state(folder)


def test_damaged_weights_are_named(tmp_path: Path, tiny_folder: Path):
    shutil.copytree(tiny_folder, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(StoreError, match=r"the checkpoint at .*model cannot be loaded"):
        load_model(tmp_path / "model")


def test_weights_without_a_config_are_not_loaded_as_a_model_of_transformers_default_size(
    tmp_path: Path, tiny_folder: Path
):
    shutil.copytree(tiny_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(StoreError, match=r"model cannot be loaded: config\.json is missing"):
        load_model(tmp_path / "model")


def test_shards_have_one_digest_that_covers_every_byte(tmp_path: Path):
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]))
    first = weights_digest(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"x")
    assert weights_digest(tmp_path) != first


def test_a_folder_without_weights_is_not_a_checkpoint(tmp_path: Path):
    with pytest.raises(StoreError, match=r"no model.safetensors"):
        weights_digest(tmp_path)
    with pytest.raises(StoreError, match="cannot be loaded"):
        load_model(tmp_path)
    with pytest.raises(StoreError, match="no checkpoint folder at"):
        load_model(tmp_path / "absent")


def test_a_second_trainer_on_a_stage_gets_an_error_that_names_the_holder(tmp_path: Path):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from osworld_pipeline.domain.state import StateDir\n"
        "from osworld_pipeline.training.weights.stage_lock import stage_lock\n"
        "with stage_lock(StateDir(Path(sys.argv[1])), 'sft-1'):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    state = StateDir(tmp_path)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with (
            pytest.raises(TrainingError, match=f"training of sft-1 has been locked by process {child.pid} "),
            stage_lock(state, "sft-1", timeout_s=0.1),
        ):
            pass
        with stage_lock(state, "sft-2", timeout_s=0.1):
            pass
    finally:
        child.kill()
        child.communicate(timeout=10)
    started = time.monotonic()
    with stage_lock(state, "sft-1"):
        assert time.monotonic() - started < 5


def test_the_stage_lock_does_not_import_torch(tmp_path: Path):
    program = "import sys, osworld_pipeline.training.weights.stage_lock; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("checkpoint_id", "stage_key", "num_updates"),
    [("sft-1-u0003", "sft-1", 3), (milestone_id("gspo_phase1-ab", 12345), "gspo_phase1-ab", 12345),
     ("sft-1", "sft-1", None), ("base-u", "base-u", None), ("sft-1-u00x3", "sft-1-u00x3", None), ("", "", None)],
)  # fmt: skip
def test_a_milestones_id_gives_its_stage_and_number_of_updates(
    checkpoint_id: str, stage_key: str, num_updates: int | None
) -> None:
    assert Ancestor.parse(checkpoint_id) == (stage_key, num_updates)
