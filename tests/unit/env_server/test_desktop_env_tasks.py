"""What is sent to desktop-env: tasks are checked before a VM is taken, and actions are rewritten as source."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from desktop_env_doubles import fake_install, task_of

from env_server.main import make_drivers, make_provider
from env_server.providers.desktop_env.actions import source_of
from env_server.providers.desktop_env.driver import DesktopEnvDrivers
from env_server.providers.desktop_env.install import DesktopEnvInstall
from env_server.providers.desktop_env.provider import DesktopEnvProvider
from env_server.providers.desktop_env.tasks import check_evaluator, harmless_task
from env_server.server_settings import ServerSettings
from env_server.settings import TaskLimits
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ActionParseError, DependencyError, TaskError

INSTALL = fake_install()
RULE = {"type": "rule", "rules": {"expected": "a"}}


def test_installed_desktop_env_is_read_without_being_imported() -> None:
    assert {"exact_match", "infeasible"} <= INSTALL.metrics
    assert {"rule", "vm_file", "tabs"} <= INSTALL.getters
    assert INSTALL.port_getters == {"tabs"}, "by way of a function that it calls"
    assert "sleep" in INSTALL.verbs
    assert "replay" not in INSTALL.verbs, "it is only promised"


def test_the_error_for_a_python_without_desktop_env_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        DependencyError, match=r"has no desktop-env; create it with `.*osworld-pipeline setup desktop-env`"
    ):
        DesktopEnvInstall.find(Path(sys.executable), (tmp_path,))
    with pytest.raises(DependencyError, match=r"cannot be run .*No such file"):
        DesktopEnvInstall.find(tmp_path / "python")


def test_server_whose_python_has_no_desktop_env_does_not_start(tmp_path: Path) -> None:
    absent = {"desktop_env": {"python": tmp_path / "python"}}
    for asked in ({"grader": "osworld"}, {"provider": "desktop_env"}):
        settings = ServerSettings.model_validate({**asked, **absent})
        with pytest.raises(DependencyError, match="setup desktop-env"):
            make_drivers(settings)
    with pytest.raises(DependencyError, match="setup desktop-env"):
        make_provider(settings)


def test_provider_that_desktop_env_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no provider 'parallels'"):
        DesktopEnvProvider(python=INSTALL.python, install=INSTALL, provider_name="parallels")


def test_image_digest_follows_what_a_vm_is_made_of(tmp_path: Path) -> None:
    image = tmp_path / "a.qcow2"
    image.write_bytes(b"a")

    def digest(**options: Any) -> str:
        return DesktopEnvProvider(python=INSTALL.python, install=INSTALL, path_to_vm=str(image), **options).image_digest

    first = digest()
    assert digest() == digest(client_password="another") == first
    assert digest(snapshot_name="b") != first
    image.write_bytes(b"ab")
    assert digest() != first


@pytest.mark.parametrize(
    ("evaluator", "sentence"),
    [
        ({"func": "no_such_metric"}, "metric 'no_such_metric'"),
        ({"func": "exact_mach"}, "metric 'exact_mach', which .* does not have: did you mean exact_match"),
        ({"func": ["infeasible"]}, "metric 'infeasible'"),
        ({"func": [{}]}, "metric {}"),
        ({"result": {"type": "no_such_getter"}}, "getter 'no_such_getter'"),
        ({"result": {}}, "'result' is not an object with a 'type'"),
        ({"result": {"type": "tabs"}}, "uses a port of the browser"),
        ({"func": ["exact_match", "exact_match"], "result": [RULE], "expected": []}, "another number of 'result'"),
        ({"func": ["exact_match"], "result": [RULE], "expected": [None]}, "'expected' is not an object"),
        ({"conj": "xor"}, "by 'xor'"),
        ({"result": {"type": "vm_file", "path": "/a", "dest": "../../a"}}, "'../../a', which is outside"),
        ({"result": {"type": "vm_file", "path": "/a", "dest": ["a", "/etc/a"]}}, "'/etc/a', which is outside"),
        ({"result": {"type": "cache_file", "path": "../a"}}, "'../a', which is outside its own folder"),
    ],
)
def test_evaluator_that_osworld_would_crash_on_is_refused_beforehand(evaluator: dict, sentence: str) -> None:
    task = Task.from_config(task_of(**evaluator))
    with pytest.raises(TaskError, match=sentence):
        check_evaluator(task, INSTALL, has_ports=False)


def test_evaluators_in_the_forms_of_osworld_are_accepted() -> None:
    for evaluator in (
        {"func": "infeasible"},
        {"func": ["exact_match", "crash"], "result": [RULE, RULE], "expected": [], "options": [{}, {}], "conj": "or"},
        {"result": {"type": "vm_file", "path": ["/a", "/b"], "dest": ["a", "b"], "multi": True}},
    ):
        check_evaluator(Task.from_config(task_of(**evaluator)), INSTALL, has_ports=False)
    browser = Task.from_config(task_of(result={"type": "tabs"}))
    check_evaluator(browser, INSTALL, has_ports=True)


def verb(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (verb("no_such_verb"), "set-up verb 'no_such_verb'"),
        ("sleep", "set-up verb None"),
        (verb("googledrive", settings_file="/etc/passwd"), "'/etc/passwd', which is outside its own folder"),
        (verb("execute", command="a", stdout="../a"), "'../a', which is outside its own folder"),
        (verb("download", files=[{"url": "http://inside.test/a", "path": "/a"}]), "downloads from inside.test"),
        (verb("download", files=[{"url": "file:///etc/passwd", "path": "/a"}]), "not a web address"),
        (verb("upload_file", files=[{"local_path": "/etc/passwd", "path": "/a"}]), "outside the server's upload"),
        (verb("upload_file", files=[{"local_path": "../secret", "path": "/a"}]), "outside the server's upload"),
        (verb("upload_file", files="a"), "needs a list of files"),
    ],
)
def test_task_with_verbs_files_or_hosts_that_are_not_allowed_is_refused(
    wrong: Any, sentence: str, tmp_path: Path
) -> None:
    drivers = DesktopEnvDrivers(python=INSTALL.python, install=INSTALL, limits=TaskLimits(upload_root=tmp_path))
    with pytest.raises(TaskError, match=sentence):
        drivers.plan(task_of(config=[wrong]))
    with pytest.raises(TaskError, match=sentence):
        drivers.plan(task_of(postconfig=[wrong]))


def test_upload_is_read_below_the_upload_folder_alone(tmp_path: Path) -> None:
    task = Task.from_config(task_of(config=[verb("upload_file", files=[{"local_path": "a", "path": "/b"}])]))
    made = harmless_task(task, INSTALL, TaskLimits(upload_root=tmp_path))
    assert made["config"][0]["parameters"]["files"] == [{"path": "/b", "local_path": str(tmp_path / "a")}]
    with pytest.raises(TaskError, match="--upload-root"):
        harmless_task(task, INSTALL, TaskLimits())


@pytest.mark.parametrize(
    ("action", "source"),
    [
        ("pyautogui.click(1, y=2)  # here", "pyautogui.click(1, y=2)"),
        ("import time\ntime.sleep(0.5)\npyautogui.press('enter')", "time.sleep(0.5); pyautogui.press('enter')"),
        ("pyautogui.write('a<b')", "pyautogui.write('a'); pyautogui.hotkey('shift', ','); pyautogui.write('b')"),
        (
            "pyautogui.typewrite('<', 0.1, logScreenshot=True)",
            "pyautogui.hotkey('shift', ',')",
        ),
        ("pyautogui.typewrite(message='<<a', interval=0.1)",
         "pyautogui.hotkey('shift', ','); pyautogui.hotkey('shift', ','); pyautogui.typewrite('a', interval=0.1)"),
        ("pyautogui.press('<')", "pyautogui.hotkey('shift', ',')"),
        ("pyautogui.hotkey(['ctrl', 'c'])", "pyautogui.hotkey(('ctrl', 'c'))"),
    ],
)  # fmt: skip
def test_action_is_rewritten_from_its_calls(action: str, source: str) -> None:
    assert source_of(action) == source


def test_string_stays_a_string_however_it_is_escaped() -> None:
    """DesktopEnv's own fix for `<` would unescape these strings and run the result."""
    for text in (
        r"\x27); __import__('os').system('id'); ('<",
        "pyautogui.press('<') + 1",
        "\\u003c\"'); import os #",
        "line\nbreak\t\\",
    ):
        calls = ast.parse(source_of(f"pyautogui.write({text!r})")).body
        names = {ast.unparse(call.value.func) for call in calls if isinstance(call, ast.Expr)}  # pyright: ignore
        assert names <= {"pyautogui.write", "pyautogui.hotkey"}
        written = [ast.literal_eval(c.value.args[0]) for c in calls if "write" in ast.unparse(c)]  # pyright: ignore
        assert "".join(written) == text.replace("<", "")


def test_action_that_is_not_a_known_call_is_refused() -> None:
    with pytest.raises(ActionParseError):
        source_of("__import__('os').system('id')")


def test_evaluators_file_from_a_host_that_is_not_allowed_is_refused() -> None:
    drivers = DesktopEnvDrivers(python=INSTALL.python, install=INSTALL, limits=TaskLimits())
    gold = {"type": "cloud_file", "path": "http://inside.test/a", "dest": "a"}
    with pytest.raises(TaskError, match=r"downloads from inside\.test are not allowed"):
        drivers.plan(task_of(result=gold))
