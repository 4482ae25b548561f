"""Demonstrations and the origins of imports: JSON lines, packed and plain, and folders of results."""

import base64
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from import_samples import OPTIONS, agentnet_record, put_attempt, put_task

from fuzz.parser import Parser, scratch_folder
from fuzz.parsers.pictures import picture
from osworld_pipeline.datasets.importers import ImportOptions
from osworld_pipeline.datasets.importers.agentnet import import_agentnet
from osworld_pipeline.datasets.importers.osworld_results import import_osworld_results
from osworld_pipeline.datasets.importers.slime_replay import import_slime_replay
from osworld_pipeline.datasets.imports import find_imports
from osworld_pipeline.datasets.raw import RawRecord, read_demonstrations
from osworld_pipeline.datasets.records import read_json
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.datasets.sources import REPLAY_SOURCES
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError

SOURCE = REPLAY_SOURCES[0]
SCREEN = picture("PNG", (200, 100))
IMAGE = base64.b64encode(SCREEN).decode()
TURN = load_dialect("slime").format("Click", {"action": "left_click", "coordinate": [3, 4]})
RECORD = {
    "task_id": "t-1::0",
    "messages": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Task: do it"}]},
        {"role": "assistant", "content": TURN},
    ],
    "images": [IMAGE],
    "reward": 1.0,
}
LINE = json.dumps(RECORD).encode() + b"\n"
AGENTNET = json.dumps(agentnet_record("t", ["pyautogui.click(x=0.5, y=0.25)", "computer.terminate(status='success')"]))


def _zstd(data: bytes) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(data)
    return buffer.getvalue().to_pybytes()


def _demonstrations(suffix: str, data: bytes) -> None:
    with scratch_folder() as folder:
        state = StateDir(folder)
        path = SOURCE.locate(state)
        path.parent.mkdir(parents=True)
        path.with_name(path.name + suffix).write_bytes(data)
        found = list(read_demonstrations(state, SOURCE))
    if not any(isinstance(one, RawRecord) for one in found):
        raise BadRecord("no record")


def _imported(
    put: Callable[[Path, bytes], Path], work: Callable[[StateDir, Path, ImportOptions], Any], data: bytes
) -> None:
    """An import of foreign data completes: each record is a demonstration or a reject, and the manifest counts them."""
    with scratch_folder() as folder:
        origin = put(folder / "in", data)
        state = StateDir(folder / "var")
        summary = work(state, origin, OPTIONS)
        imports, rejects = find_imports(state.imports)
        assert [one.manifest.name for one in imports] == ["theirs"]
        assert not rejects
        assert len(list(imports[0].rejects())) == summary.num_rejects
        read = list(read_demonstrations(state, imports[0].demonstrations))
        assert [type(one) for one in read] == [RawRecord] * summary.num_demonstrations
    if not summary.num_demonstrations:
        raise BadRecord("no demonstration")


def _put_lines(folder: Path, data: bytes) -> Path:
    (folder / "images").mkdir(parents=True)
    for number in range(2):
        (folder / "images" / f"{number}.png").write_bytes(SCREEN)
    path = folder / "some.jsonl"
    path.write_bytes(data)
    return path


def _put_results(folder: Path, data: bytes) -> Path:
    """`data` holds the trajectory, then the result and the arguments of the run, separated by NUL bytes."""
    trajectory, result, arguments = (*data.split(b"\0", 2), b"", b"")[:3]
    attempt = put_attempt(folder, "solved", ["pyautogui.click(3, 4)", "DONE"])
    (attempt / "traj.jsonl").write_bytes(trajectory)
    (attempt / "result.txt").write_bytes(result)
    (attempt.parents[1] / "args.json").write_bytes(arguments)
    put_task(folder.parent / "var" / "osworld", "solved")
    return folder


def _manifest(data: bytes) -> None:
    with scratch_folder() as folder:
        (folder / "theirs").mkdir()
        (folder / "theirs" / "source.json").write_bytes(data)
        found, _ = find_imports(folder)
    if not found:
        raise BadRecord("no import")


def _results_seed() -> bytes:
    with scratch_folder() as folder:
        attempt = put_attempt(folder, "solved", ["pyautogui.click(3, 4)", "DONE"])
        return (attempt / "traj.jsonl").read_bytes() + b"\0" + b"1.0\n" + b"\0" + b'{"model": "m"}'


def _manifest_seed() -> bytes:
    with scratch_folder() as folder:
        state = StateDir(folder / "var")
        import_agentnet(state, _put_lines(folder / "in", AGENTNET.encode()), OPTIONS)
        return (state.imports / "theirs" / "source.json").read_bytes()


PARSERS = [
    Parser(name="json", read=read_json, refusals=(BadRecord,), seeds=(LINE, b'{"a": NaN}', b"[1e400, -0.0]")),
    *(
        Parser(
            name=f"demonstrations{suffix.replace('.', '_')}",
            read=partial(_demonstrations, suffix),
            refusals=(BadRecord,),
            seeds=(pack(LINE * 2), pack(LINE + b"\n{}\n")),
        )
        for suffix, pack in {"": bytes, ".gz": gzip.compress, ".zst": _zstd}.items()
    ),
    Parser(
        name="import_agentnet",
        read=lambda data: _imported(_put_lines, import_agentnet, data),
        refusals=(BadRecord, DatasetError),
        seeds=(AGENTNET.encode(),),
    ),
    Parser(
        name="import_slime_replay",
        read=lambda data: _imported(_put_lines, import_slime_replay, data),
        refusals=(BadRecord, DatasetError),
        seeds=(LINE, json.dumps(RECORD | {"images": ["images/0.png"], "source_dataset": "d"}).encode()),
    ),
    Parser(
        name="import_osworld_results",
        read=lambda data: _imported(_put_results, import_osworld_results, data),
        refusals=(BadRecord, DatasetError),
        seeds=(_results_seed(),),
    ),
    Parser(name="import_manifest", read=_manifest, refusals=(BadRecord,), seeds=(_manifest_seed(),)),
]
