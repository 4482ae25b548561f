"""Weights that are copied to the machine of a policy server: they arrive unchanged, complete or not at all, and nothing
is written elsewhere."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos import Server, policy_server
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sglang_samples import fake_servers, text_request, write_adapter, write_checkpoint
from weights_receiver import TOKEN, Receiver, receiving

from osworld_pipeline.agent.renderer import Renderer
from osworld_pipeline.errors import EngineError
from osworld_pipeline.policy_servers.received_weights import MARK, ReceivedWeights, RefusedError
from osworld_pipeline.policy_servers.receiver import serve
from osworld_pipeline.recipes.schema import EngineSection
from osworld_pipeline.rollout.engines.sglang import SglangEngine

VOCAB_SIZE = 320


def engine_of(renderer: Renderer, receiver: Receiver, *urls: str, vocab_size: int = VOCAB_SIZE) -> SglangEngine:
    section = EngineSection(
        kind="sglang",
        urls=urls,
        weights="upload",
        receiver_port=receiver.port,
        request_timeout_s=10.0,
        retry_budget_s=5.0,
    )
    return SglangEngine(section.urls, renderer=renderer, section=section, vocab_size=vocab_size, owner="u", token=TOKEN)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_changed(folder: Path, target: Path, factor: float) -> Path:
    """Writes the checkpoint with other weights."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = {name: tensor * factor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors")
    return target


def kill_in_upload(receiver: Receiver) -> None:
    def half() -> Iterator[bytes]:
        yield b"half"
        deadline = time.monotonic() + 10
        while not any(list(folder.iterdir()) for folder in receiver.incoming()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        receiver.process.kill()
        yield b"the rest"

    with pytest.raises(httpx.TransportError):
        put(receiver, "/v1/uploads/one/model.safetensors", half())


def put(receiver: Receiver, path: str, content: Any, **headers: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}", **headers}
    return httpx.put(f"{receiver.url}{path}", content=content, headers=headers, trust_env=False)


@pytest.fixture(scope="module")
def renderer(processor: Any) -> Renderer:
    return Renderer(processor)


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with policy_server(tmp_path_factory.mktemp("server"), checkpoint=tiny_folder) as running:
        running.wait_ready()
        yield running


async def test_a_server_samples_the_weights_of_a_folder_that_only_the_program_sees(
    server: Server, renderer: Renderer, tiny_folder: Path, tmp_path: Path
) -> None:
    other = write_changed(tiny_folder, tmp_path / "other", 1.1)
    (other / "optimizer.bin").write_bytes(b"not sent")
    with receiving(tmp_path / "received") as receiver:
        engine = engine_of(renderer, receiver, server.url)
        try:
            for version in (1, 2):
                await engine.load_weights(other, policy_version=version)
                result = await engine.generate(text_request(renderer, max_new_tokens=3))
                assert result.policy_version == version
        finally:
            await engine.close()
        # The check of the vision cache has copied a tensor, too.
        (stored,) = [path for path in receiver.stored() if not path.name.startswith("check-")]
        assert not receiver.incoming()
        sent = contents(other)
        assert contents(stored) == {name: sent[name] for name in ("config.json", "model.safetensors")}


async def test_an_adapter_and_its_base_are_copied_once(renderer: Renderer, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base)
    with (
        fake_servers(renderer, model_path=str(base), lora=True) as start,
        receiving(tmp_path / "received") as receiver,
    ):
        fakes = [start(), start()]
        vocab_size = len(renderer.tokenizer) + 8
        engine = engine_of(renderer, receiver, *(fake.url for fake in fakes), vocab_size=vocab_size)
        try:
            await engine.load_weights(adapter, policy_version=1)
        finally:
            await engine.close()
        stored = {path.name.partition("-")[0]: path for path in receiver.stored()}
        assert len(stored) == 2
        places = {place for fake in fakes for place in fake.adapters.values()}
        assert places == {str(stored["adapter"])}, "both servers read the one copy on their machine"
        received = contents(stored["adapter"])
    sent = contents(adapter / "adapter")
    assert received == {name: sent[name] for name in ("adapter_config.json", "adapter_model.safetensors")}


async def test_a_receiver_killed_during_an_upload_keeps_nothing_of_it_and_the_next_upload_is_complete(
    server: Server, renderer: Renderer, tiny_folder: Path, tmp_path: Path
) -> None:
    with receiving(tmp_path / "received") as receiver:
        port = receiver.port
        await asyncio.to_thread(kill_in_upload, receiver)
        assert receiver.incoming()
    with receiving(tmp_path / "received", port=port) as receiver:
        assert not receiver.incoming()
        engine = engine_of(renderer, receiver, server.url)
        try:
            await engine.load_weights(tiny_folder, policy_version=1)
        finally:
            await engine.close()
        (stored,) = receiver.stored()
        assert contents(stored)["model.safetensors"] == (tiny_folder / "model.safetensors").read_bytes()


async def test_without_a_receiver_the_error_names_its_address(
    server: Server, renderer: Renderer, tiny_folder: Path, tmp_path: Path
) -> None:
    with receiving(tmp_path / "received") as receiver:
        pass
    other = write_changed(tiny_folder, tmp_path / "other", 1.2)
    engine = engine_of(renderer, receiver, server.url)
    try:
        with pytest.raises(EngineError, match=f"no server answers at http://127.0.0.1:{receiver.port}/v1/weights/"):
            await engine.load_weights(other, policy_version=1)
    finally:
        await engine.close()


def test_an_upload_needs_the_token_and_a_file_name_of_weights(tmp_path: Path) -> None:
    with receiving(tmp_path / "received") as receiver:
        for headers in ({"Authorization": "Bearer other"}, {"Authorization": ""}):
            answer = put(receiver, "/v1/uploads/one/model.safetensors", b"x", **headers)
            assert answer.status_code == 401
            assert TOKEN not in answer.text
        for path in ("one/model.bin", "one/..%2Fmodel.safetensors", "one/.model.safetensors", "..%2Fone/config.json"):
            assert put(receiver, f"/v1/uploads/{path}", b"x").status_code in (400, 404), path
        assert not receiver.stored()
        assert not receiver.incoming()
        assert put(receiver, "/v1/uploads/one/model.safetensors", b"content").status_code == 200
        end = {"name": "weights", "files": {"model.safetensors": 5}}
        url, headers = f"{receiver.url}/v1/uploads/one", {"Authorization": f"Bearer {TOKEN}"}
        refused = httpx.post(url, json=end, headers=headers, trust_env=False)
        assert refused.status_code == 400
        assert "were announced" in refused.json()["error"]["message"]
        for body in (b"[]", b"{", b'{"name": "weights"}', b'{"name": "weights", "files": {"a": "b"}}'):
            assert httpx.post(url, content=body, headers=headers, trust_env=False).status_code == 400
        assert not receiver.stored()
        assert not receiver.incoming()


def test_a_network_is_not_served_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="set ENGINE_TOKEN"):
        serve(tmp_path, host="0.0.0.0", port=0, keep=2, token=None, on_ready=print)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != MARK)


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def upload(weights: ReceivedWeights, name: str) -> Path:
    await weights.write(f"of-{name}", "model.safetensors", stream(b"ab", name.encode()))
    return weights.complete(name, f"of-{name}", {"model.safetensors": 2 + len(name)})


async def test_the_most_recently_used_weights_are_kept(tmp_path: Path) -> None:
    weights = ReceivedWeights(root=tmp_path, keep=2)
    weights.open()
    for age, name in enumerate(("one", "two")):
        os.utime(await upload(weights, name), (1000 + age, 1000 + age))
    assert weights.find("one") == tmp_path / "one"
    await upload(weights, "three")
    assert names_in(tmp_path) == ["one", "three"]
    assert weights.find("two") is None


def test_a_folder_with_foreign_files_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-VL-4B").mkdir()
    with pytest.raises(EngineError, match="name an empty or a new folder"):
        ReceivedWeights(root=tmp_path, keep=2).open()
    assert names_in(tmp_path) == ["Qwen3-VL-4B"]


async def test_a_broken_upload_takes_no_space(tmp_path: Path) -> None:
    weights = ReceivedWeights(root=tmp_path, keep=2)
    weights.open()

    async def breaks() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await weights.write("one", "model.safetensors", breaks())
    assert names_in(tmp_path) == []


async def test_the_first_of_two_uploads_of_the_same_name_is_kept(tmp_path: Path) -> None:
    weights = ReceivedWeights(root=tmp_path, keep=2)
    weights.open()
    first = await upload(weights, "same")
    inode = first.stat().st_ino
    assert await upload(weights, "same") == first
    assert first.stat().st_ino == inode
    assert names_in(tmp_path) == ["same"]


@given(name=st.text(max_size=12), file_name=st.text(max_size=12))
def test_no_name_of_weights_or_files_leads_outside_the_root(
    tmp_path_factory: pytest.TempPathFactory, name: str, file_name: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    weights = ReceivedWeights(root=root / "store", keep=2)
    weights.open()
    for file in (file_name, f"{file_name}.safetensors", f"{file_name}.safetensors.index.json"):
        try:
            asyncio.run(weights.write(name, file, stream(b"x")))
            weights.complete(name, name, {file: 1})
        except RefusedError:
            continue
        assert weights.find(name) == root / "store" / name
    outside = [path for path in root.rglob("*") if path.is_file() and (root / "store") not in path.parents]
    assert not outside
