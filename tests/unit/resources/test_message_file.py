from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
from dagster_pipes import PipesDefaultMessageWriter

from resources.message_file import MessageFile

MESSAGE = b'{"method": "log", "params": {}}\n'


class Handler:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def handle_message(self, message: Any) -> None:
        self.messages.append(message)


def opened(messages: MessageFile, handler: Handler) -> Any:
    return messages.read_messages(cast(dg.PipesMessageHandler, handler))


def append(params: Any, data: bytes) -> None:
    with open(params[PipesDefaultMessageWriter.FILE_PATH_KEY], "ab") as file:
        file.write(data)


@pytest.mark.parametrize("cut", range(1, len(MESSAGE)))
def test_a_line_is_read_when_it_is_complete(cut: int) -> None:
    messages, handler = MessageFile(), Handler()
    with opened(messages, handler) as params:
        append(params, MESSAGE + MESSAGE[:cut])
        messages.read_new()
        assert len(handler.messages) == 1
        append(params, MESSAGE[cut:])
        messages.read_new()
        messages.read_new()
        assert len(handler.messages) == 2


def test_the_incomplete_line_of_a_killed_program_is_left_out_and_its_file_is_removed() -> None:
    messages, handler = MessageFile(), Handler()
    with opened(messages, handler) as params:
        append(params, MESSAGE + MESSAGE[:9])
    assert len(handler.messages) == 1
    assert not Path(params[PipesDefaultMessageWriter.FILE_PATH_KEY]).parent.exists()
