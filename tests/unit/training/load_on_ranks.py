"""What the test of sharded loading runs on each rank: it loads a model and reports what the rank read and held."""

import json
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file

from osworld_pipeline.training.distributed.process_group import ProcessGroup
from osworld_pipeline.training.distributed.sharded_loading import empty_model, load_shards
from osworld_pipeline.training.distributed.sharding import gather_weights, shard_model
from osworld_pipeline.training.objective.score import FORWARD_METHOD, add_forward_method


def own_bytes() -> int:
    """The bytes of this process's memory that no file backs."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


class Peak:
    """The peak of the process's memory above its value at the start."""

    def __enter__(self) -> "Peak":
        self._start, self.num_bytes = own_bytes(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.num_bytes = max(self.num_bytes, own_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def load(process_group: ProcessGroup, folder: Path, out: Path) -> None:
    with Peak() as peak:
        model = empty_model(folder, dtype=torch.float32)
        add_forward_method(model)
        shard_model(model, process_group, forward_method=FORWARD_METHOD)
        num_read = load_shards(model, folder, process_group.device)
    reported = process_group.gather((num_read, peak.num_bytes))
    weights = gather_weights(model)
    if process_group.is_main:
        stored = load_file(folder / "model.safetensors")
        is_same = all(torch.equal(weights[name], tensor) for name, tensor in stored.items())
        is_tied = model.lm_head.weight is model.model.language_model.embed_tokens.weight
        out.write_text(json.dumps({"ranks": reported, "is_same": is_same, "is_tied": is_tied}))
