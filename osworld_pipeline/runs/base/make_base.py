"""Makes the base checkpoint: a tiny random Qwen3-VL in the state folder, or a card that points to a published one."""

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.observation_text import LastAction, observation_text
from osworld_pipeline.dialects import Dialect, load_dialect
from osworld_pipeline.dialects.actions import Arguments, move_points
from osworld_pipeline.dialects.coordinates import Size, from_screen
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.errors import ActionParseError, DependencyError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import PretrainedModelSection, TinyModelSection
from osworld_pipeline.runs.checkpoints.ids import (
    CARD,
    checkpoint_card,
    read_checkpoint,
    recipe_suite,
    stage_recipe_digest,
)
from osworld_pipeline.runs.checkpoints.model_card import card_licence
from osworld_pipeline.runs.job import StageJob
from osworld_pipeline.runs.messages import Progress, Report
from osworld_pipeline.tracking.code import code_origin
from osworld_pipeline.training.weights.stage_lock import stage_lock

REPORT_EVERY = 10
"""Updates of pretraining between progress reports."""
NUMBERS_UP_TO = 2048
"""Limit of the coordinates in the tokenizer's corpus. Digits are single tokens, so the tokenizer learns only the
punctuation around numbers from these texts."""


def main(job: StageJob, report: Report) -> dict[str, Any]:
    """Result: the checkpoint's card.

    Raises:
        DependencyError: a published model is neither a folder nor available from its hub.
        StoreError: the model has no weights, or the checkpoint cannot be written.
        TrainingError: another process is making this checkpoint.
    """
    total = _num_updates(job.recipe)
    report(Progress(done=0, total=total or 1, note=f"{job.recipe.model.kind} model"))
    with stage_lock(job.state, job.checkpoint_id):
        checkpoint = read_checkpoint(job.state, job.checkpoint_id) or _make(job, report)
    report(Progress(done=total or 1, total=total or 1))
    return checkpoint_card(checkpoint)


def _make(job: StageJob, report: Report) -> Checkpoint:
    from osworld_pipeline.training.weights.checkpoint import (
        final_dir,
        remove_stale_writes,
        write_folder,
        write_json,
    )
    from osworld_pipeline.training.weights.weights_digest import weights_digest

    checkpoint_id, recipe, state, code = job.checkpoint_id, job.recipe, job.state, code_origin()
    model = recipe.model
    remove_stale_writes(state, checkpoint_id)
    folder = final_dir(state, checkpoint_id)
    published = resolve_pretrained(model) if isinstance(model, PretrainedModelSection) else None

    def fill(temp: Path) -> None:
        if isinstance(model, TinyModelSection):
            from osworld_pipeline.training.tiny.model import build_tiny_checkpoint

            total = _num_updates(recipe)

            def on_progress(done: int, loss: float) -> None:
                if done % REPORT_EVERY == 0 or done == total:
                    report(Progress(done=done, total=total, note=f"copying, loss {loss:.2f}"))

            build_tiny_checkpoint(temp, model, tokenizer_corpus(recipe), on_progress=on_progress)
        card = Checkpoint(
            checkpoint_id=checkpoint_id,
            stage=Stage.BASE,
            parent_id=None,
            path=str(published or folder.relative_to(state.root)),
            num_updates=0,
            recipe_digest=stage_recipe_digest(Stage.BASE, recipe),
            data_digest=job.data_digest,
            weights_digest=weights_digest(published or temp),
            licence=card_licence(published) if published else None,
            run_ids=job.run_ids,
            recipe=recipe.model_dump(mode="json"),
            code_version=code.version,
            is_code_dirty=code.is_dirty,
            saved_at=round(time.time(), 3),
        )
        write_json(temp / CARD, checkpoint_card(card))

    write_folder(folder, fill)
    saved = read_checkpoint(state, checkpoint_id)
    assert saved is not None, f"{checkpoint_id} was saved and cannot be read"
    return saved


def _num_updates(recipe: Recipe) -> int:
    """Number of pretraining updates."""
    return recipe.model.copying_updates if isinstance(recipe.model, TinyModelSection) else 0


def resolve_pretrained(model: PretrainedModelSection) -> Path:
    """The folder of a published model: the path itself, or the hub's snapshot at the recipe's revision.

    Raises:
        DependencyError: it is neither on disk nor available; names it and a fix.
    """
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.path, revision=model.revision)).resolve()
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise DependencyError(
            f"model.path '{model.path}' is not a folder, and the hub did not provide it at revision "
            f"{model.revision or 'main'} ({str(error).splitlines()[0]}): download it and set model.path to its folder"
        ) from error


def tokenizer_corpus(recipe: Recipe) -> Iterator[str]:
    """The system prompts, the text that a model reads and writes in the suite's training tasks, turn by turn, and
    clicks at many coordinates."""
    dialect = load_dialect(recipe.agent.dialect, recipe.agent.coordinate_space)
    screen = (recipe.desktop.screen_width, recipe.desktop.screen_height)
    for kind in ("short", recipe.agent.system_prompt):
        yield f"system\n{dialect.system_prompt(kind)}"
    for item in recipe_suite(recipe).train:
        for index, step in enumerate(item.oracle):
            text = observation_text(
                Observation(screenshot=b""),
                item.task,
                step_index=index,
                last_action=LastAction() if index else None,
                a11y_max_length=0,
            )
            yield f"user\n{text}"
            yield from _said(dialect, step.description, step.arguments, screen)
    for x in range(0, NUMBERS_UP_TO, 16):
        arguments = {"action": "left_click", "coordinate": [x, NUMBERS_UP_TO - x]}
        yield from _said(dialect, f"Click at {x}", arguments, (NUMBERS_UP_TO + 1, NUMBERS_UP_TO + 1))


def _said(dialect: Dialect, description: str, arguments: Arguments, screen: Size) -> Iterator[str]:
    """The turn, if the dialect can express it."""
    move = partial(from_screen, space=dialect.coordinate_space, image=screen, screen=screen)
    with suppress(ActionParseError):
        yield f"assistant\n{dialect.format(description, move_points(arguments, move))}"
