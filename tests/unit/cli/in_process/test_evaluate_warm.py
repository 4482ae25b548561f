"""`evaluate` starts the imports of its program early, if there is something to run that needs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from checkpoint_samples import make_checkpoint, write_evaluation
from rich.console import Console

from osworld_pipeline.cli.in_process import evaluate
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import load_recipe
from osworld_pipeline.runs.evaluate.plan import TaskChoice
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from resources.state import RecipeResource

SERVER = ("engine.kind=sglang", 'engine.urls=["http://gpu-1:30000"]')


class Opened(Exception):
    """Raised when the session is opened, because the test needs no more."""


@pytest.fixture
def is_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    state = StateDir(tmp_path)

    @contextmanager
    def opened(*args: Any, starts_warm: bool, **options: Any) -> Iterator[None]:
        raise Opened(starts_warm)
        yield

    monkeypatch.setattr(evaluate, "open_in_process", opened)

    def ask(checkpoint: str, *settings: str) -> bool:
        with pytest.raises(Opened) as found:
            evaluate.run_evaluate(
                dg.Definitions(), source=RecipeResource(name="smoke", settings=list(settings)), state_root=state.root,
                checkpoint=checkpoint, choice=TaskChoice(), console=Console(quiet=True),
            )  # fmt: skip
        return bool(found.value.args[0])

    for name in ("sft-1", "sft-2"):
        upsert_checkpoint(state, make_checkpoint(name))
    write_evaluation(state, load_recipe("smoke"), "sft-2", num_successes=1)
    upsert_checkpoint(state, make_checkpoint("http-1", path="http://policies:8000/v1#model"))
    return ask


def test_imports_start_early_for_an_evaluation_with_missing_episodes(is_warm: Any) -> None:
    assert is_warm("sft-1")


def test_imports_do_not_start_early_for_a_finished_evaluation(is_warm: Any) -> None:
    assert not is_warm("sft-2")


def test_imports_do_not_start_early_if_servers_sample(is_warm: Any) -> None:
    assert not is_warm("sft-1", *SERVER)
    assert not is_warm("http-1")
