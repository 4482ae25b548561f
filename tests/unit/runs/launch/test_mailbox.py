"""Jobs, messages and heartbeats between a launcher and its program, through a folder."""

import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.runs.launch import mailbox as mailboxes
from osworld_pipeline.runs.launch.mailbox import (
    Mailbox,
    MessageReader,
    MessageWriter,
    open_mailbox,
    orphaned_mailboxes,
    remove_orphan,
    watched_launcher,
)
from osworld_pipeline.runs.messages import Info, Progress


def test_a_job_is_readable_by_this_user_alone_and_is_removed_once_read(tmp_path: Path):
    mailbox = Mailbox(tmp_path)
    mailbox.put_job({"token": "hush"})
    assert stat.S_IMODE((tmp_path / "job.json").stat().st_mode) == 0o600
    assert mailbox.take_job() == {"token": "hush"}
    assert list(tmp_path.iterdir()) == []


def test_a_missing_job_is_one_clear_error(tmp_path: Path):
    with pytest.raises(StoreError, match="its launcher has ended"):
        Mailbox(tmp_path).take_job()


@given(parts=st.lists(st.lists(st.text(max_size=40), max_size=6), max_size=5))
def test_messages_arrive_once_and_in_their_order(tmp_path_factory: pytest.TempPathFactory, parts: list[list[str]]):
    mailbox = Mailbox(tmp_path_factory.mktemp("mailbox"))
    writer, reader = MessageWriter(mailbox), MessageReader(mailbox=mailbox)
    for part in parts:
        for text in part:
            writer.report(Info(message=text))
        assert reader.read() == [Info(message=text) for text in part]
    assert reader.read() == []


def numbered(number: int) -> Progress:
    return Progress(done=number, total=200)


def test_messages_that_were_read_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mailboxes, "SEGMENT_BYTES", 100)
    mailbox = Mailbox(tmp_path)
    writer, reader = MessageWriter(mailbox), MessageReader(mailbox=mailbox)
    numbers = []
    for number in range(200):
        writer.report(numbered(number))
        if number % 20 == 19:
            numbers += reader.read()
            assert len(mailbox.segments()) <= 2
    assert numbers == [numbered(number) for number in range(200)]


def test_an_incomplete_line_of_a_killed_writer_does_not_corrupt_the_lines_of_the_next_writer(tmp_path: Path):
    mailbox = Mailbox(tmp_path)
    reader = MessageReader(mailbox=mailbox)
    MessageWriter(mailbox).report(numbered(1))
    with mailbox.segment(1).open("a") as file:
        file.write('{"kind": "progress", "do')
    assert reader.read() == [numbered(1)]
    MessageWriter(mailbox).report(numbered(3))
    assert reader.read() == [numbered(3)]


def test_a_mailbox_whose_launcher_is_alive_is_not_an_orphan(tmp_path: Path):
    state = StateDir(tmp_path)
    with open_mailbox(state, "living") as mailbox:
        assert orphaned_mailboxes(state) == []
        assert stat.S_IMODE(mailbox.folder.stat().st_mode) == 0o700
    assert list(state.launches.iterdir()) == []


def test_a_mailbox_whose_launcher_is_dead_is_an_orphan(tmp_path: Path):
    state = StateDir(tmp_path)
    dead = state.launches / "dead"
    dead.mkdir(parents=True)
    (state.launches / "dead.lock").touch()
    (orphan,) = orphaned_mailboxes(state)
    assert orphan.name == "dead"
    (state.launches / "dead.lock").touch()
    remove_orphan(orphan.folder)
    assert orphaned_mailboxes(state) == []
    assert list(state.launches.iterdir()) == []


def test_a_program_receives_the_request_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mailboxes, "WATCH_EVERY_S", 0.01)
    mailbox = Mailbox(tmp_path)
    stopped, lost = threading.Event(), threading.Event()
    with watched_launcher(mailbox, lost_after_s=60, on_stop=stopped.set, on_lost=lost.set):
        assert not stopped.wait(0.1)
        mailbox.ask_to_stop()
        assert stopped.wait(5)
    assert not lost.is_set()


def test_a_program_notices_that_its_launcher_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mailboxes, "WATCH_EVERY_S", 0.01)
    mailbox = Mailbox(tmp_path)
    lost = threading.Event()
    with watched_launcher(mailbox, lost_after_s=0.5, on_stop=lambda: None, on_lost=lost.set):
        for _ in range(8):
            mailbox.beat()
            assert not lost.wait(0.1)
        assert lost.wait(5)
