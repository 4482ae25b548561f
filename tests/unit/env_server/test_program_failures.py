"""How the programs of servers fail: with one sentence and a file with the traceback, unless --debug prints it."""

import json
import tempfile
from pathlib import Path

import pytest

from env_server import main as env_server
from env_server.gateway_server import main as gateway
from env_server.providers.qemu.build import find_image
from env_server.providers.qemu.recipe import recipe_digest
from osworld_pipeline import console_scripts

PROGRAMS = {"env-server": env_server, "osworld-gateway": gateway}


@pytest.fixture(params=list(PROGRAMS))
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program that has a defect."""

    def defect(*_: object) -> None:
        raise KeyError("shelf")

    module = PROGRAMS[request.param]
    monkeypatch.setattr(module, "prepare_process", defect)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return request.param


def test_a_defect_is_reported_in_one_sentence_and_its_traceback_is_in_a_file(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAMS[program].main([]) == 1
    said = capsys.readouterr()
    (sentence,) = said.err.splitlines()
    (file,) = tmp_path.glob(f"{program}-*.traceback")
    assert sentence == (f"{program}: a defect of this program: KeyError: 'shelf'; its traceback is in {file}")
    assert "Traceback" in file.read_text()
    assert "in defect" in file.read_text()
    assert said.out == ""


def test_debug_prints_the_traceback_and_writes_no_file(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PROGRAMS[program].main(["--debug"]) == 1
    said = capsys.readouterr().err
    assert "in defect" in said
    assert said.endswith("its traceback is above\n")
    assert list(tmp_path.iterdir()) == []


def test_with_json_a_defect_is_an_object(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert PROGRAMS[program].main(["--json"]) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert (error["type"], error["exit_status"]) == ("InternalError", 1)


def test_a_defect_of_a_command_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(env_server.COMMANDS, "doctor", "env_server.doctor:no_such_function")
    assert env_server.main(["doctor", "--debug"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("env-server: a defect of this program: AttributeError:")


def test_a_program_that_cannot_be_imported_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_server.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["env-server"])
    assert console_scripts._run("env-server", "broken_server") == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("env-server: a defect of this program: ZeroDivisionError: ")


def test_an_interrupt_has_the_status_of_the_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gateway, "prepare_process", interrupted)
    assert gateway.main([]) == 130
    assert capsys.readouterr().err == ""
    assert gateway.main(["--json"]) == 130
    assert json.loads(capsys.readouterr().err)["error"]["type"] == "Interrupted"


def test_build_image_prints_the_image_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"base-{recipe_digest()[:24]}"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "disk.qcow2").write_bytes(b"12345")
    image = find_image(tmp_path)
    assert image is not None
    assert env_server.main(["build-image", "--state-dir", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["folder"], answer["digest"], answer["num_bytes"]) == (str(folder), image.digest, 5)
