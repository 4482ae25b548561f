"""Raw sources from dataset ids: pinned, checked against the lock, resumed, and every failure is one clear error. The
hub's real client talks to a small server of our own."""

import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from progress_reports import last_of_each

from osworld_pipeline.datasets.hub import Fetched, fetch_sources, parse_request
from osworld_pipeline.datasets.source_lock import LOCK_FILE, read_source_lock
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.progress import Progress

COMMIT, LATER = "a" * 40, "b" * 40
NAME = "osworld_sft_curated_final.jsonl"
PLACE = f"osworld_datasets/osworld-sft-curated-final/{NAME}"
TOKEN = "hf_secretsecretsecret"
SHOWN = 20_000


class Hub:
    """What the server holds, and the requests it received."""

    def __init__(self) -> None:
        self.commits = {"main": COMMIT, COMMIT: COMMIT}
        self.files = {NAME: b'{"task_id": "t"}\n' * 4_000}
        self.card: dict[str, Any] | None = {"license": "apache-2.0"}
        self.status = 200
        self.cut_after: int | None = None
        self.is_down_after: int | None = None
        self.requests: list[tuple[str, str, str]] = []
        self.url = ""

    def num_downloads(self) -> int:
        return sum(method == "GET" and "/resolve/" in path for method, path, _ in self.requests)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        hub.requests.append((self.command, self.path, self.headers.get("Range", "")))
        info = re.fullmatch(r"/api/datasets/org/data(?:/revision/([^?/]+))?(?:\?.*)?", self.path)
        file = re.fullmatch(r"/datasets/org/data/resolve/([0-9a-f]{40})/([^?]+)(?:\?.*)?", self.path)
        if hub.is_down_after is not None and hub.num_downloads() > hub.is_down_after:
            self.answer(500, b"{}", {})
        elif hub.status != 200:
            self.answer(hub.status, b"{}", {})
        elif info and (commit := hub.commits.get(info[1] or "main")):
            siblings = [{"rfilename": name} for name in hub.files]
            body = {"id": "org/data", "sha": commit, "siblings": siblings, "cardData": hub.card, "tags": []}
            self.answer(200, json.dumps(body).encode(), {})
        elif info:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif file and file[2] in hub.files:
            self.send_file(hub.files[file[2]], file[1])
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send_file(self, data: bytes, commit: str) -> None:
        tag = f'"{len(data):x}-{hash(data) & 0xFFFFFFFF:x}"'
        headers = {"ETag": tag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206 if start else 200, data[start:], headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after
        if cut is not None and "/resolve/" in self.path:
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


def fetch(hub: Hub, root: Path, text: str = "sft_curated_final=org/data") -> Fetched:
    return fetch_sources([parse_request(text)], root, endpoint=hub.url)[0]


def test_a_source_is_put_where_the_union_build_looks(hub: Hub, tmp_path: Path) -> None:
    fetched = fetch(hub, tmp_path)
    assert fetched.path == tmp_path / PLACE
    assert fetched.path.read_bytes() == hub.files[NAME]
    lock = read_source_lock(tmp_path)["sft_curated_final"]
    assert (lock.repo_id, lock.requested, lock.revision, lock.licence) == ("org/data", "main", COMMIT, "apache-2.0")
    assert (lock.num_bytes, len(lock.sha256)) == (len(hub.files[NAME]), 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".fetch.lock", "osworld_datasets", LOCK_FILE,
    ]  # fmt: skip


def test_a_file_that_is_present_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    assert fetch(hub, tmp_path).was_there
    assert hub.num_downloads() == 1


def test_a_locked_commit_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    hub.status = 500
    assert fetch(hub, tmp_path, f"sft_curated_final=org/data@{COMMIT}").was_there


def test_a_branch_that_moved_brings_the_new_commit(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    hub.commits["main"] = LATER
    hub.files[NAME] = b"{}\n"
    assert fetch(hub, tmp_path).lock.revision == LATER
    assert (tmp_path / PLACE).read_bytes() == b"{}\n"


def test_another_content_under_the_same_revision_is_refused(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    (tmp_path / PLACE).unlink()
    before, hub.files[NAME] = hub.files[NAME], b"{}\n"
    with pytest.raises(DatasetError, match=r"another .* under the same revision"):
        fetch(hub, tmp_path)
    assert not (tmp_path / PLACE).exists()
    hub.files[NAME] = before
    assert not fetch(hub, tmp_path).was_there


def test_a_file_that_was_changed_here_is_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    (tmp_path / PLACE).write_bytes(b"changed")
    assert not fetch(hub, tmp_path).was_there
    assert (tmp_path / PLACE).read_bytes() == hub.files[NAME]


def test_a_cut_download_leaves_no_file_and_is_resumed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1_000)
    hub.cut_after, hub.is_down_after = SHOWN, 1
    with pytest.raises(DatasetError, match="cannot fetch sft_curated_final from org/data@main"):
        fetch(hub, tmp_path)
    assert not (tmp_path / PLACE).exists()
    hub.cut_after = hub.is_down_after = None
    hub.requests.clear()
    fetch(hub, tmp_path)
    assert (tmp_path / PLACE).read_bytes() == hub.files[NAME]
    ranges = [asked for method, path, asked in hub.requests if method == "GET" and "/resolve/" in path]
    assert ranges == [f"bytes={SHOWN}-"]


def test_a_download_counts_its_bytes_also_when_it_is_resumed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1_000)
    hub.cut_after, hub.is_down_after = SHOWN, 1
    with pytest.raises(DatasetError):
        fetch(hub, tmp_path)
    hub.cut_after = hub.is_down_after = None
    seen: list[Progress] = []
    fetch_sources([parse_request("sft_curated_final=org/data")], tmp_path, endpoint=hub.url, on_progress=seen.append)
    num_bytes = len(hub.files[NAME])
    received = [one.done for one in seen if one.what == "receiving sft_curated_final"]
    assert received[:2] == [0, SHOWN], "what the first download left counts"
    assert last_of_each(seen) == {
        "looking for sft_curated_final": (0, 0, ""),
        "receiving sft_curated_final": (num_bytes, num_bytes, "bytes"),
        "checking sft_curated_final": (0, 0, ""),
    }
    assert capfd.readouterr().err == ""


def test_a_file_deeper_in_the_repository_is_found_or_named(hub: Hub, tmp_path: Path) -> None:
    hub.files = {f"data/{NAME}": b"one\n", "other.jsonl": b"two\n"}
    assert fetch(hub, tmp_path).lock.filename == f"data/{NAME}"
    assert fetch(hub, tmp_path, "sft_curated_final=org/data:other.jsonl").lock.filename == "other.jsonl"
    assert (tmp_path / PLACE).read_bytes() == b"two\n"


@pytest.mark.parametrize(
    ("files", "request_text", "reason"),
    [
        ({"a.txt": b""}, "sft_curated_final=org/data", f"no files named {NAME} .* there are: a.txt"),
        ({f"a/{NAME}": b"", f"b/{NAME}": b""}, "sft_curated_final=org/data", "2 files named .* name one"),
        ({}, "sft_curated_final=org/data:b.jsonl", "no file b.jsonl in org/data"),
        ({}, "sft_curated_final=org/data@nowhere", "no such revision"),
        ({}, "sft_curated_final=org/none", "no such dataset, or it is private"),
    ],
)
def test_a_request_for_something_that_is_missing_gives_one_clear_error(
    hub: Hub, tmp_path: Path, files: dict[str, bytes], request_text: str, reason: str
) -> None:
    hub.files = files
    with pytest.raises(DatasetError, match=reason):
        fetch(hub, tmp_path, request_text)


def test_a_hub_that_cannot_be_reached_gives_one_clear_error_without_the_token(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    caplog.set_level(logging.DEBUG)
    hub.status = 503
    with pytest.raises(DatasetError, match="status 503; try again") as failed:
        fetch(hub, tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        hub.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DatasetError, match=r"the hub cannot be reached \(\w+\); check the network") as unreachable:
            fetch(hub, tmp_path)
    assert TOKEN not in f"{failed.value}{unreachable.value}{caplog.text}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("org/data", "SOURCE=ORG/NAME"),
        ("sft_clean=data", "SOURCE=ORG/NAME"),
        ("nothing=org/data", "no source named 'nothing'; there are: sft_curated_final"),
        ("osworld_repo=org/data", "no source named 'osworld_repo'"),
    ],
)
def test_an_invalid_request_is_refused_with_the_correct_form(text: str, reason: str) -> None:
    with pytest.raises(DatasetError, match=reason):
        parse_request(text)


def test_a_damaged_lock_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text('{"sft_clean": {}}')
    with pytest.raises(DatasetError, match="restore it, or remove it and fetch again"):
        read_source_lock(tmp_path)
