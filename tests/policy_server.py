"""A policy server of our own that tests may kill: real samples of a real checkpoint, over the part of sglang's HTTP
interface that our engine speaks.

`python policy_server.py CHECKPOINT PORT PARENT_PID`. After a restart it holds CHECKPOINT again, under a label that
was never loaded; it ends with the process that started it.
"""

import asyncio
import base64
import io
import itertools
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from osworld_pipeline.agent.model_inputs import build_model_inputs
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.episode import SamplingParams
from osworld_pipeline.errors import EngineError
from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.engines.sglang_broadcast import INCOMPLETE
from osworld_pipeline.rollout.engines.transformers import TransformersEngine
from osworld_pipeline.rollout.engines.transformers_weights import read_weights
from osworld_pipeline.runs.parent import die_with_parent
from osworld_pipeline.training.model import load_model

UPDATE_PATHS = (
    *("/begin_weight_update", "/init_weights_update_group", "/update_weights_from_distributed"),
    *("/destroy_weights_update_group", "/end_weight_update"),
)
PIXELS_PER_TOKEN = 32
"""Of an image's side."""


def join_group(body: Mapping[str, Any]) -> Any:
    """Does the same as sglang.srt.utils.init_custom_process_group."""
    timeout = timedelta(seconds=60)
    address = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, size = next(iter(rendezvous(address, body["rank_offset"], body["world_size"], timeout=timeout)))
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(body["backend"]),
        dist.PrefixStore(body["group_name"], store),
        group_name=body["group_name"],
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {one: one for one in range(size)}
    return group


class Policy:
    """The engine that samples in process, called from the threads of a server."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        self._processor = load_processor(folder)
        self._model = load_model(folder, is_frozen=True)
        self._weights = read_weights(folder, model=self._model)
        self._labels = {0: "default"}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._engine = TransformersEngine(self._model, self._processor, timeout_s=60.0)
        self._loading = threading.Lock()
        self._group: Any = None
        self._is_in_update = False
        self._cover = ""
        """The label during a transfer."""
        self._sessions: dict[str, float] = {}
        """Monotonic times at which they expire."""

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        if path == "/model_info":
            return {
                "model_path": self.path,
                "weight_version": self._cover or self._label(self._engine.policy_version),
                "has_image_understanding": True,
                "model_type": "qwen3_vl",
            }
        if path == "/update_weights_from_disk":
            return self._load(Path(body["model_path"]), body["weight_version"])
        if path == "/update_weight_version":
            # Tokens that were sampled before keep their label.
            self._cover = body["new_version"] if body["new_version"].startswith(INCOMPLETE) else ""
            if not self._cover:
                self._labels[self._engine.policy_version] = body["new_version"]
            return {"success": True}
        if path == "/server_info":
            return {"tp_size": 1, "pp_size": 1, "dp_size": 1}
        if path in UPDATE_PATHS:
            return self._receive(path, body)
        if path in ("/open_session", "/close_session"):
            return self._session(path, body)
        if path in ("/pause_generation", "/continue_generation"):
            return {"status": "ok"}
        return self._generate(body) if path == "/generate" else None

    def _session(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        name, now = body["session_id"], time.monotonic()
        with self._loading:
            if path == "/close_session":
                self._sessions.pop(name, None)
            elif self._sessions.get(name, 0.0) > now:
                raise EngineError(f"the session {name} is still open")
            else:
                self._sessions[name] = now + (body["timeout"] or float("inf"))
        return {"session_id": name}

    def _label(self, version: int) -> str:
        return self._labels[version]

    def _receive(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """As in sglang: the calls come in this order, each bucket through a real process group."""
        try:
            if path == "/init_weights_update_group":
                self._group = join_group(body)
            elif path == "/destroy_weights_update_group":
                dist.destroy_process_group(self._group)
            elif path == "/begin_weight_update":
                if self._is_in_update:
                    return {"success": False, "message": "a weight-update session is already open"}
                self._is_in_update = True
            elif path == "/end_weight_update":
                self._is_in_update = False
            else:
                self._receive_bucket(body)
        except RuntimeError as error:
            return {"success": False, "message": f"Failed to receive weights: {error}"}
        return {"success": True, "message": "Success"}

    def _receive_bucket(self, body: Mapping[str, Any]) -> None:
        assert self._is_in_update
        assert body["load_format"] == "flattened_bucket"
        sizes = [
            math.prod(shape) * getattr(torch, dtype).itemsize
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._group)
        parts = zip(body["names"], body["dtypes"], body["shapes"], data.split(sizes), strict=True)
        received = {name: part.view(getattr(torch, dtype)).view(shape) for name, dtype, shape, part in parts}
        with self._loading:
            assert received.keys() <= self._weights.keys()
            self._weights = self._weights | received
            if body["flush_cache"]:  # the last bucket
                version = len(self._labels)
                self._labels[version] = self._cover
                self._run(self._engine.load_state(self._weights, policy_version=version))

    def _load(self, folder: Path, label: str) -> dict[str, Any]:
        """Tensors that the folder does not hold stay unchanged."""
        with self._loading:
            try:
                self._weights = self._weights | read_weights(folder, model=self._model)
            except EngineError as error:
                return {"success": False, "message": str(error)}
            version = len(self._labels)
            self._labels[version] = label
            self._run(self._engine.load_state(self._weights, policy_version=version, source=folder))
            self.path = str(folder)
        return {"success": True, "message": "loaded"}

    def _generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        images = tuple(base64.b64decode(image) for image in body.get("image_data", ()))
        prompt = self._expanded(body["input_ids"], images)
        reported = body["sampling_params"]
        sampling = SamplingParams(
            temperature=reported["temperature"],
            top_p=reported["top_p"],
            max_new_tokens=reported["max_new_tokens"],
            stop=tuple(reported["stop"]),
            seed=reported["sampling_seed"],
        )
        request = GenerateRequest(sampling=sampling, token_ids=tuple(prompt), images=images)
        result: GenerateResult = self._run(self._engine.generate(request))
        versions = result.policy_versions or (result.policy_version,) * len(result.token_ids)
        meta: dict[str, Any] = {
            "finish_reason": {"type": result.finish_reason},
            "prompt_tokens": len(prompt),
            "weight_version": self._label(versions[-1]),
            "weight_versions": self._spans(versions),
            "output_token_logprobs": [
                [logprob, token_id, None] for logprob, token_id in zip(result.logprobs, result.token_ids, strict=True)
            ],
        }
        if watched := body.get("token_ids_logprob"):
            scores = self._first_logprobs(prompt, images, reported)
            meta["output_token_ids_logprobs"] = [[[scores[index], index, None] for index in watched]]
        return {"output_ids": list(result.token_ids), "prompt_token_ids": prompt, "meta_info": meta}

    def _spans(self, versions: Sequence[int]) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        start = 0
        for version, group in itertools.groupby(versions):
            end = start + len(list(group))
            spans.append({"version": self._label(version), "start": start, "end": end})
            start = end
        return spans

    def _expanded(self, token_ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Each placeholder is repeated as often as its image has tokens."""
        expanded: list[int] = []
        rest = iter(images)
        for token_id in token_ids:
            num = 1
            if token_id == self._processor.image_token_id:
                with Image.open(io.BytesIO(next(rest))) as image:
                    num = (image.width // PIXELS_PER_TOKEN) * (image.height // PIXELS_PER_TOKEN)
            expanded += [token_id] * num
        return expanded

    @torch.no_grad()
    def _first_logprobs(
        self, prompt: Sequence[int], images: Sequence[bytes], reported: Mapping[str, Any]
    ) -> list[float]:
        inputs = build_model_inputs(self._processor, [(prompt, images)])
        with self._loading:
            logits = self._model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits
        logits_V = logits[0, -1].float()
        for token_id, bias in reported.get("logit_bias", {}).items():
            logits_V[int(token_id)] += bias
        return torch.log_softmax(logits_V / (reported["temperature"] or 1.0), dim=-1).tolist()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60.0)


def serve(policy: Policy, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

        def log_message(self, format: str, *args: Any) -> None: ...

        def _reply(self, body: Mapping[str, Any]) -> None:
            try:
                truth, status = policy.answer(self.path, body), 200
            except EngineError as error:
                truth, status = {"error": str(error)}, 400 if "session" in self.path else 500
            data = json.dumps({"detail": "Not Found"} if truth is None else truth).encode()
            self.send_response(404 if truth is None else status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, parent_pid=int(sys.argv[3]))
    torch.set_num_threads(1)
    serve(Policy(Path(sys.argv[1])), int(sys.argv[2]))
