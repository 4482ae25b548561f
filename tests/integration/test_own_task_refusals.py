"""The examples of docs/evaluators.md on real desktops: a metric scores what the page says, and a misspelt task is
refused over HTTP with the available names."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from env_server_process import running_env_server

from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import TaskError
from osworld_pipeline.rollout.env_client import EnvClient
from osworld_pipeline.task_schema.metrics import METRICS

pytestmark = [pytest.mark.desktop, pytest.mark.slow]

FILES = {
    "people.csv": "name,born\nAda,1815\n",
    "settings.json": '{"theme": "dark", "editor": {"tab": 4}}',
    "notes/todo.txt": "milk\n",
    "wanted.txt": "milk\n",
    "photos/sea.jpg": "a",
    "photos/wood.jpg": "b",
}
FULFILLED = (
    "check_csv", "check_direct_json_object", "check_include_exclude", "check_json", "check_list", "check_moved_jpgs",
    "compare_result_files", "compare_text_file", "diff_text_file", "exact_match", "fuzzy_match", "is_in_list",
    "literal_match", "match_in_list", "windows_exact_match", "windows_non_empty",
)  # fmt: skip
"""Examples that these files fulfil."""
UNFULFILLED = {
    "check_line_number": 0, "file_contains": 0, "windows_date_format": 0.1, "windows_has_all": 0.5,
    "windows_names_listed": 0.1,
}  # fmt: skip
"""Those that they do not; the others want a clipboard, a clock's service or GNOME."""


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_env_server(tmp_path_factory.mktemp("words"), num_replicas=1) as server:
        yield server.url


def task_of(evaluator: Mapping[str, Any], **changes: Any) -> Task:
    uploads = [{"path": f"/home/user/{name}", "content": content} for name, content in FILES.items()]
    config = [{"type": "upload_file", "parameters": {"files": uploads}}]
    return Task.from_config(
        {"id": "words", "instruction": "Do it.", "config": config, "evaluator": evaluator, **changes}
    )


async def score(client: EnvClient, evaluator: Mapping[str, Any]) -> float:
    desktop = client.desktop()
    try:
        await desktop.reset(task_of(evaluator))
        return await desktop.score()
    finally:
        await desktop.close()


async def test_examples_of_metrics_score_what_the_page_says(server_url: str) -> None:
    examples = [METRICS[name].example for name in FULFILLED]
    together = {key: [one.get(key, {}) for one in examples] for key in ("func", "result", "expected", "options")}
    async with EnvClient(server_url) as client:
        assert await score(client, together) == 1.0, "the mean of all"
        assert {name: await score(client, METRICS[name].example) for name in UNFULFILLED} == UNFULFILLED


async def test_misspelt_tasks_are_refused_with_the_available_names(server_url: str) -> None:
    example = METRICS["check_include_exclude"].example
    wrong = {
        "'wait', which does not exist: there are activate_window": task_of(example, config=[{"type": "wait"}]),
        "did you mean check_include_exclude": task_of({**example, "func": "check_includes"}),
        "its rules are include, exclude": task_of(
            {**example, "expected": {"type": "rule", "rules": {"contains": ["milk"]}}}
        ),
    }
    async with EnvClient(server_url) as client:
        for sentence, task in wrong.items():
            desktop = client.desktop()
            with pytest.raises(TaskError, match=sentence):
                await desktop.reset(task)
            await desktop.close()
