"""A fake policy server on a real socket, for engines over HTTP. It answers as sglang does, or as it is configured."""

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer that replaces the correct one."""

    status: int = 200
    body: bytes = b"{}"
    headers: tuple[tuple[str, str], ...] = ()
    is_dropped: bool = False
    """The connection breaks in the middle of the body."""
    is_silent: bool = False
    """Nothing comes until the server is closed."""


@dataclass(kw_only=True, eq=False)
class FakeSglang:
    """Samples the ids of `reply`. Each call of a path first uses the answers that `instead` holds for it."""

    reply: tuple[int, ...]
    image_id: int
    label: str = "default"
    model_path: str = "/checkpoint"
    model_type: str = "qwen3_vl"
    ignores_temperature: bool = False
    """Its log-probabilities are those before temperature."""
    ignores_bans: bool = False
    keeps_stale_images: bool = False
    load_s: float = 0.0
    """How long a load takes, in which nothing else but /model_info is answered."""
    is_session_server: bool = True
    lora: bool | None = None
    """Whether it was started for adapters; None of an endpoint that lists no models."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Loaded ones by name, with their folders."""
    knows_label: bool = True
    """False: it reports weights that it was never given."""
    adds_tokens: tuple[int, ...] = ()
    """It makes a longer prompt of what it is sent."""
    spans: tuple[tuple[str, int, int], ...] = ()
    """Weight versions of the sampled tokens, where they are not all of the present one."""
    workers: tuple[str, ...] | None = None
    instead: dict[str, list[Answer]] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """Authorization headers."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of answers to OpenAI's path, in turn."""
    url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)
    num_loads: int = 0
    num_broken_loads: int = 0
    """Those that began while another was under way, or without a pause: the real server dies of the first."""
    is_paused: bool = False
    sessions: dict[str, float] = field(default_factory=dict)
    """When each ends."""
    guard: threading.RLock = field(default_factory=threading.RLock)
    is_loading: bool = False

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def wait_for(self, path: str, *, limit_s: float = 10.0) -> None:
        """Waits until the path was called."""
        deadline = time.monotonic() + limit_s
        while path not in self.paths():
            assert time.monotonic() < deadline, f"{path} was not called within {limit_s:g} s"
            time.sleep(0.01)

    def requests(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        self.calls.append((path, body))
        waiting = self.instead.get(path)
        if waiting:
            return waiting.pop(0)
        if path in ("/open_session", "/close_session") and self.is_session_server:
            return self._session(path, body)
        if path == "/generate":
            refusal = self._wait_to_generate(body)
            if refusal is not None:
                return refusal
        if path == "/load_lora_adapter" and self.lora is False:
            message = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
            return Answer(status=400, body=json.dumps({"success": False, "error_message": message}).encode())
        truth = self._truth(path, body)
        if truth is None:
            return Answer(status=404, body=b'{"detail": "Not Found"}')
        return Answer(body=json.dumps(truth).encode())

    def _truth(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/model_info":
            architectures = [f"{self.model_type}ForConditionalGeneration"]
            return {
                "model_path": self.model_path,
                "weight_version": self.label,
                "has_image_understanding": True,
                "model_type": self.model_type,
                "architectures": architectures,
            }
        if path == "/update_weights_from_disk":
            return self._load(body)
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return {"success": True}
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation"
            return {"status": "ok"}
        if path in ("/load_lora_adapter", "/unload_lora_adapter") and self.lora:
            if path == "/load_lora_adapter":
                self.adapters[body["lora_name"]] = body["lora_path"]
            else:
                self.adapters.pop(body["lora_name"], None)
            return {"success": True}
        if path == "/v1/models" and self.lora is not None:
            return {"data": [{"id": name} for name in ("base", *self.adapters)]}
        if path == "/workers" and self.workers is not None:
            return {"workers": [{"url": url} for url in self.workers]}
        if path in ("/v1/chat/completions", "/v1/models") and self.bodies:
            return self.bodies.pop(0)
        return self._generate(body) if path == "/generate" else None

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.guard:
            self.num_broken_loads += self.is_loading or not self.is_paused
            self.is_loading = True
        time.sleep(self.load_s)
        with self.guard:
            self.label, self.model_path = body["weight_version"], body["model_path"]
            self.num_loads += 1
            self.is_loading = False
        return {"success": True, "message": "loaded"}

    def _session(self, path: str, body: dict[str, Any]) -> Answer:
        name = body["session_id"]
        with self.guard:
            now = time.monotonic()
            self.sessions = {one: end for one, end in self.sessions.items() if end > now}
            if path == "/close_session":
                self.sessions.pop(name, None)
                return Answer(body=b"")
            if name in self.sessions:
                message = "Failed to open the session. Check if a session with the same id is still open."
                return Answer(status=400, body=json.dumps({"error": {"message": message}}).encode())
            self.sessions[name] = now + body["timeout"] if body["timeout"] is not None else float("inf")
        return Answer(body=json.dumps(name).encode())

    def _wait_to_generate(self, body: dict[str, Any]) -> Answer | None:
        deadline = time.monotonic() + 10
        while self.is_paused or self.is_loading:
            if self.closing.is_set() or time.monotonic() > deadline:
                return Answer(is_silent=True)
            time.sleep(0.005)
        adapter = body.get("lora_path")
        if adapter is None or adapter in self.adapters:
            return None
        message = f"Got LoRA adapter that has never been loaded: {adapter}"
        return Answer(status=400, body=json.dumps({"error": {"message": message}}).encode())

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        banned = {int(key) for key, bias in body["sampling_params"].get("logit_bias", {}).items() if bias < -1e6}
        ids = [token_id for token_id in self.reply if self.ignores_bans or token_id not in banned]
        ids = ids[: body["sampling_params"]["max_new_tokens"]]
        temperature = 1.0 if self.ignores_temperature else body["sampling_params"]["temperature"] or 1.0
        weights = 0 if self.keeps_stale_images else self.num_loads
        label = self.label if self.knows_label else "somebody's"
        spans = self.spans or ((label, 0, len(ids)),)
        watched = body.get("token_ids_logprob") or []
        return {
            "text": "",
            "output_ids": ids,
            "prompt_token_ids": self._expand(body),
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "prompt_tokens": len(self._expand(body)),
                "weight_version": label,
                "weight_versions": [{"version": name, "start": start, "end": end} for name, start, end in spans],
                "output_token_logprobs": [[-0.5 - index / 8, token_id, None] for index, token_id in enumerate(ids)],
                "output_token_ids_logprobs": [
                    [[(-1.0 - (index % 7) / 4 - weights) / temperature, index, None] for index in watched]
                ],
            },
        }

    def _expand(self, body: dict[str, Any]) -> list[int]:
        images = iter(body.get("image_data", []))
        ids: list[int] = []
        for token_id in body["input_ids"]:
            num = 1
            if token_id == self.image_id:
                with Image.open(io.BytesIO(base64.b64decode(next(images)))) as image:
                    num = (image.width // 32) * (image.height // 32)
            ids += [token_id] * num
        return [*ids, *self.adds_tokens]


@contextmanager
def serving(fake: FakeSglang, *, port: int = 0) -> Iterator[FakeSglang]:
    """Serves the fake on its own port; `url` is its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._reply(json.loads(body or b"{}"))

        def log_message(self, format: str, *args: Any) -> None: ...

        def _reply(self, body: dict[str, Any]) -> None:
            fake.tokens.append(self.headers.get("Authorization", ""))
            answer = fake.answer(self.path, body)
            if answer.is_silent:
                fake.closing.wait(30)
                self.close_connection = True
                return
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(answer.body) + 100 * answer.is_dropped))
            for name, value in answer.headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)
            self.close_connection = answer.is_dropped

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        fake.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
