"""Weights are identified by content: every process computes the same name for a folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_samples import write_adapter, write_checkpoint

from osworld_pipeline.errors import EngineError
from osworld_pipeline.rollout.engines import sglang_weights
from osworld_pipeline.rollout.engines.sglang_weights import (
    Label,
    read_weights,
    vision_digest,
    vocab_size_of,
    weights_digest,
    write_digest,
)
from osworld_pipeline.training.weights import manifest
from osworld_pipeline.training.weights.weights_digest import weights_digest as checkpoint_digest


def never(*_: Any) -> str:
    raise AssertionError("the files are not to be read")


def test_the_same_content_has_the_same_name_in_any_folder(tmp_path: Path) -> None:
    one, copy = write_checkpoint(tmp_path / "one", words=1), write_checkpoint(tmp_path / "copy", words=1)
    other = write_checkpoint(tmp_path / "other", words=2)
    assert weights_digest(one) == weights_digest(copy) != weights_digest(other)


def test_another_process_gives_the_same_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one")
    code = (
        "import sys, pathlib; from osworld_pipeline.rollout.engines.sglang_weights import weights_digest;"
        "print(weights_digest(pathlib.Path(sys.argv[1])))"
    )
    said = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == weights_digest(folder)


def test_content_is_hashed_chunk_by_chunk_and_the_order_of_the_chunks_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "CHUNK_BYTES", 4)
    digests = set()
    for index, data in enumerate((b"aaaabbbb", b"bbbbaaaa", b"aaaabbbbc")):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(data)
        digests.add(weights_digest(folder))
    assert len(digests) == 3


def test_the_name_of_a_checkpoint_is_its_weights_digest_and_no_weights_are_read_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sglang_weights.MANIFEST_FILE == manifest.MANIFEST_FILE
    for names in (["model.safetensors"], ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]):
        folder = write_checkpoint(tmp_path / f"{len(names)}-files")
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_bytes(data + name.encode())
        (folder / manifest.MANIFEST_FILE).write_text(json.dumps(manifest.build_manifest(folder, {})))
        with monkeypatch.context() as patch:
            patch.setattr(sglang_weights, "_hashed", never)
            assert checkpoint_digest(folder).startswith(weights_digest(folder))


def test_a_stored_digest_is_used_until_the_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "one")
    before = weights_digest(folder)
    write_digest(folder)
    with monkeypatch.context() as patch:
        patch.setattr(sglang_weights, "_hashed", never)
        assert weights_digest(folder) == before
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b"more")
    assert weights_digest(folder) != before


def test_a_large_base_without_a_manifest_is_read_once_for_all_adapters_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_checkpoint(tmp_path / "base")
    adapters = [write_adapter(tmp_path / f"adapter-{factors}", base, factors=factors) for factors in (1, 2)]
    read: list[tuple[Path, int]] = []
    digest_span = sglang_weights._digest_span

    def noted(path: Path, span: Any) -> str:
        read.append((path, span.start))
        return digest_span(path, span)

    monkeypatch.setattr(sglang_weights, "_digest_span", noted)
    monkeypatch.setattr(sglang_weights, "CHUNK_BYTES", 64)
    assert len({read_weights(adapter, policy_version=1).digest for adapter in adapters}) == 1
    assert (base / "model.safetensors", 0) in read
    assert len(set(read)) == len(read)


def test_an_adapter_written_by_peft_is_read_over_the_base_that_its_config_names(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "run", base) / "adapter"
    (adapter / "base.json").unlink()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    weights = read_weights(adapter, policy_version=1)
    assert (weights.path, weights.adapter and weights.adapter.path) == (base, adapter)
    assert vocab_size_of(adapter) == 512


def test_the_vision_digest_depends_on_the_vision_tensors_alone(tmp_path: Path) -> None:
    one, words, tower = (
        write_checkpoint(tmp_path / "one"),
        write_checkpoint(tmp_path / "words", words=1),
        write_checkpoint(tmp_path / "tower", tower=1),
    )
    assert vision_digest(one) == vision_digest(words) != vision_digest(tower)
    assert vision_digest(tmp_path / "nowhere") == ""


def test_the_name_of_an_adapter_depends_on_its_factors_their_scale_and_the_name_of_its_base(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    plain = read_weights(base, policy_version=0)
    found = [
        read_weights(
            write_adapter(tmp_path / f"{factors}-{alpha}", base, factors=factors, alpha=alpha), policy_version=1
        )
        for factors, alpha in ((1, 16), (2, 16), (1, 32))
    ]
    assert {weights.digest for weights in found} == {plain.digest}
    assert {weights.path for weights in found} == {base}
    assert len({weights.name for weights in found} | {plain.name}) == 4


def test_whole_weights_next_to_an_adapter_are_loaded(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    merged = write_checkpoint(tmp_path / "merged", words=1)
    write_adapter(tmp_path / "adapter-of", base)
    (tmp_path / "adapter-of" / "adapter").rename(merged / "adapter")
    weights = read_weights(merged, policy_version=1)
    assert (weights.path, weights.adapter) == (merged, None)


def test_missing_weights_a_missing_base_and_a_missing_vocabulary_size_are_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no weights .*nowhere"):
        read_weights(tmp_path / "nowhere", policy_version=1)
    orphan = write_adapter(tmp_path / "orphan", tmp_path / "gone")
    with pytest.raises(
        EngineError, match=r"base checkpoint of the adapter .*orphan/adapter is missing: there is no folder .*/gone"
    ):
        read_weights(orphan, policy_version=1)
    with pytest.raises(EngineError, match=r"config\.json has no vocabulary size"):
        vocab_size_of(tmp_path / "nowhere")


def test_the_size_of_the_vocabulary_is_that_of_the_embedding(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    assert vocab_size_of(base) == 512
    assert vocab_size_of(write_adapter(tmp_path / "adapter", base)) == 512


@pytest.mark.parametrize("text", ["default", "v1.2.3", "osworld", "check-0a1b", ""])
def test_a_label_in_another_format_is_read_as_the_name_of_the_weights(text: str) -> None:
    assert Label.parse(text) == Label(weights=text)


def test_a_label_that_is_written_and_parsed_is_unchanged() -> None:
    label = Label(weights="ab" * 12, vision="", owner="12345678")
    assert Label.parse(str(label)) == label
