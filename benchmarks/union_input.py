"""Generated raw sources for the union build: six files of demonstrations with duplicates and chunks, task tables and a
tree. The same size, kind and seed give the same bytes."""

import base64
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES

InputKind = Literal["text", "images"]
SHARES = {"sft_curated_final": 5, "sft_curated_v3": 4, "sft_hybrid": 4, "combined_sft": 3, "sft_clean": 2, "bc_sft": 2}
DUPLICATE_SHARE = 0.25
"""Share of records that are duplicates of a better source."""
CHUNK_SHARE = 0.2
NUM_RECENT = 400
MAX_TURNS = 12
NUM_SCREENSHOTS = 40
SCREEN = (1280, 720)
APPS = ("chrome", "gimp", "libreoffice_calc", "libreoffice_writer", "os", "thunderbird", "vlc", "vs_code")
ROLES = ("push-button", "menu-item", "text", "label", "toggle-button", "link", "table-cell", "check-box")
WORDS = (
    *("open", "save", "file", "edit", "view", "insert", "format", "tools", "help", "close", "print", "export", "find"),
    *("replace", "copy", "paste", "cell"),
)


@dataclass(frozen=True, kw_only=True)
class GeneratedInput:
    hf_root: Path
    osworld_repo: Path
    num_bytes: int
    """Size of the demonstrations."""
    num_records: int


def generate_input(folder: Path, *, kind: InputKind, num_bytes: int, seed: int = 0) -> GeneratedInput:
    """Make the input under `folder`, or use that of an earlier call."""
    root = folder / f"{kind}-{num_bytes}-{seed}"
    ready = root / "ready.json"
    if not ready.is_file():
        maker = _Maker(kind, random.Random(f"{kind}/{num_bytes}/{seed}"))
        written = records = 0
        for source in REPLAY_SOURCES:
            size, count = maker.write_source(
                root / "hf" / source.path, source.name, num_bytes * SHARES[source.name] // sum(SHARES.values())
            )
            written, records = written + size, records + count
        maker.write_tasks(root)
        ready.write_text(json.dumps({"num_bytes": written, "num_records": records}))
    return GeneratedInput(hf_root=root / "hf", osworld_repo=root / "osworld", **json.loads(ready.read_text()))


class _Maker:
    def __init__(self, kind: InputKind, rng: random.Random) -> None:
        self._rng = rng
        self._screenshots = (
            [_screenshot(rng.randrange(2**32)) for _ in range(NUM_SCREENSHOTS)] if kind != "text" else []
        )
        self._recent: list[dict[str, Any]] = []
        self._task_ids: list[str] = []

    def write_source(self, path: Path, name: str, num_bytes: int) -> tuple[int, int]:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = count = 0
        with path.open("wb") as file:
            while size < num_bytes:
                for record in self._records(name):
                    size += file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    count += 1
        return size, count

    def _records(self, name: str) -> Iterator[dict[str, Any]]:
        rng = self._rng
        if self._recent and rng.random() < DUPLICATE_SHARE:
            yield rng.choice(self._recent)
            return
        task_id = f"task-{rng.randrange(2**32):08x}"
        self._task_ids.append(task_id)
        if rng.random() < CHUNK_SHARE:
            for index in range(rng.randint(2, 3)):
                yield self._record(f"{task_id}_chunk{index}", name)
            return
        record = self._record(task_id, name)
        if len(self._recent) < NUM_RECENT:
            self._recent.append(record)
        else:
            self._recent[rng.randrange(NUM_RECENT)] = record
        yield record

    def _record(self, task_id: str, name: str) -> dict[str, Any]:
        rng = self._rng
        num_turns = rng.randint(1, MAX_TURNS)
        is_list, images = rng.random() < 0.5, []
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.8:
            messages.append(_turn("system", "You are a GUI agent. One action per response.", is_list=is_list))
        for index in range(num_turns):
            task = f"{' '.join(rng.choices(WORDS, k=12))} — naïve café №{index}"
            text = f"[Task]\n{task}\n[Accessibility Tree]\n{self._tree()}"
            messages.append(_turn("user", text, is_list=is_list, has_image=bool(self._screenshots)))
            if self._screenshots:
                images.append(("data:image/png;base64," if is_list else "") + rng.choice(self._screenshots))
            messages.append(_turn("assistant", self._answer(is_last=index == num_turns - 1), is_list=is_list))
        id_key = rng.choice(("task_id", "id", "metadata"))
        place = {"metadata": {"task_id": task_id, "origin": name}} if id_key == "metadata" else {id_key: task_id}
        return {**place, rng.choice(("messages", "conversations")): messages, "images": images}

    def _tree(self) -> str:
        rng = self._rng
        size, lines = rng.randint(800, 4096), []
        while size > 0:
            x, y = rng.randrange(1280), rng.randrange(720)
            line = f'{rng.choice(ROLES)}\t"{rng.choice(WORDS)} {rng.choice(WORDS)}"\t({x}, {y})\t(80, 24)\tenabled'
            lines.append(line)
            size -= len(line) + 1
        return "\n".join(lines)[:4096]

    def _answer(self, *, is_last: bool) -> str:
        rng = self._rng
        point = [rng.randrange(1280), rng.randrange(720)]
        arguments: dict[str, Any] = rng.choice((
            {"action": "left_click", "coordinate": point},
            {"action": "left_click", "coordinate": point},
            {"action": "double_click", "coordinate": point},
            {"action": "right_click", "coordinate": point},
            {"action": "type", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 8))) + "\n"},
            {"action": "key", "keys": rng.choice((["ctrl", "s"], ["enter"], ["alt", "f4"], ["escape"]))},
            {"action": "scroll", "direction": rng.choice(("up", "down")), "amount": rng.randint(1, 9)},
            {"action": "wait"},
        ))  # fmt: skip
        if is_last:
            arguments = {"action": "terminate", "status": "success"}
        call = {"name": "computer_use", "arguments": arguments}
        return f"Action: {rng.choice(WORDS)} the {rng.choice(WORDS)}.\n<tool_call>{json.dumps(call)}</tool_call>"

    def write_tasks(self, root: Path) -> None:
        rng = self._rng
        chosen = rng.sample(self._task_ids, min(len(self._task_ids), 600))
        distilled, in_tree = chosen[: len(chosen) // 2], chosen[len(chosen) // 3 :]
        rows = {
            "distill_train": distilled[::2], "distill_test": distilled[1::2], "variance_subset": distilled[::5],
            "gspo_tasks": chosen[:200], "gspo_tasks_aligned": chosen[:100],
        }  # fmt: skip
        for source in TASK_SOURCES:
            path = root / "hf" / source.path
            if source.kind == "task_ids":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps({"task_id": name, "turns": 3}) + "\n" for name in chosen))
            elif source.kind == "task_table":
                path.parent.mkdir(parents=True, exist_ok=True)
                table = [{"prompt": name, "task_id": name} for name in rows[source.name]]
                if source.has_config:
                    table = [{**row, "task_config": json.dumps(_config(row["task_id"], rng))} for row in table]
                pq.write_table(pa.Table.from_pylist(table), path)
        for name in in_tree:
            config = _config(name, rng)
            path = root / "osworld" / "evaluation_examples" / "examples" / config["related_apps"][0] / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(config, indent=2))


def _turn(role: str, text: str, *, is_list: bool, has_image: bool = False) -> dict[str, Any]:
    if not is_list:
        return {"role": role, "content": ("<image>\n" if has_image else "") + text}
    image = [{"type": "image"}] if has_image else []
    return {"role": role, "content": [*image, {"type": "text", "text": text}]}


def _config(task_id: str, rng: random.Random) -> dict[str, Any]:
    app = rng.choice(APPS)
    is_windows = rng.random() < 0.1
    return {
        "id": task_id,
        "snapshot": "excel" if is_windows and rng.random() < 0.5 else app,
        "instruction": f"Please {rng.choice(WORDS)} the {rng.choice(WORDS)} — now.",
        "config": [{"type": "open", "parameters": {"path": "C:\\Users\\me\\a.xlsx" if is_windows else "/home/user/a"}}],
        "related_apps": [app],
        "evaluator": {"func": "exact_match", "expected": {"rules": {"ratio": 0.25, "n": 3}}},
    }


def _screenshot(seed: int) -> str:
    """A PNG that compresses like a desktop: flat areas, text, and a photograph."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", SCREEN, tuple(int(value) for value in rng.integers(0, 256, 3)))
    draw = ImageDraw.Draw(image)
    for _ in range(60):
        x, y = int(rng.integers(0, SCREEN[0])), int(rng.integers(0, SCREEN[1]))
        draw.rectangle((x, y, x + int(rng.integers(20, 400)), y + int(rng.integers(10, 200))),
                       fill=tuple(int(value) for value in rng.integers(0, 256, 3)))  # fmt: skip
        draw.text((x, y), " ".join(rng.choice(WORDS, 8)), fill=(0, 0, 0))
    noise = rng.integers(0, 256, (180, 240, 3), dtype=np.uint8)
    image.paste(Image.fromarray(noise), (int(rng.integers(0, 1000)), int(rng.integers(0, 500))))
    sink = io.BytesIO()
    image.save(sink, "PNG")
    return base64.b64encode(sink.getvalue()).decode()
