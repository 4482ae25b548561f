"""OSWorld's result folders: every attempt becomes an episode of the trajectory store, and every success that our
dialect can express becomes a demonstration. Imported as evaluations, the attempts are rows of `evals` and not training
data. An attempt without a grader's score is a fault or a timeout, not a score of 0.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from osworld_pipeline.datasets.images import MAX_IMAGE_BYTES
from osworld_pipeline.datasets.importers.calls import Pointer, ToPixels, actions_of, read_code
from osworld_pipeline.datasets.importers.folder import (
    ImportOptions,
    ImportSummary,
    ImportWriter,
    open_import,
    publish,
)
from osworld_pipeline.datasets.importers.images import ProvenImage
from osworld_pipeline.datasets.importers.lines import OnProgress
from osworld_pipeline.datasets.importers.results_episode import SUCCESS_THRESHOLD, StepActions, attempt_episode
from osworld_pipeline.datasets.importers.results_evaluation import as_evaluation, tasks_by_model, with_original_task_id
from osworld_pipeline.datasets.importers.results_reader import (
    ResultAttempt,
    find_attempts,
    plain,
    read_attempt,
    read_result,
)
from osworld_pipeline.datasets.importers.turns import Conversation
from osworld_pipeline.datasets.records import read_exactly
from osworld_pipeline.datasets.regular_files import read_regular_file
from osworld_pipeline.datasets.rejects import BadRecord
from osworld_pipeline.domain.episode import Episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ActionParseError, DatasetError
from osworld_pipeline.store import TrajectoryStore

IMPORTER = "osworld-results"
EPISODES_PER_PART = 32


def import_osworld_results(
    state: StateDir,
    path: Path,
    options: ImportOptions,
    *,
    osworld_path: Path | None = None,
    as_evaluations: bool = False,
    on_progress: OnProgress | None = None,
) -> ImportSummary:
    """`path`: the results, any level of their tree; `osworld_path`: the OSWorld checkout with their tasks, for
    instructions and configs (default: the state's own tree). With `as_evaluations` each model is a separate checkpoint
    in `evals`, and there are no demonstrations, because evaluation tasks are not trained on.

    Raises:
        DatasetError: no attempts found, bad options, or another import runs.
        StoreError: the file system refused.
    """
    root = path.resolve()
    folders = find_attempts(root)
    tasks = (osworld_path or state.osworld_repo) / "evaluation_examples" / "examples"
    with open_import(state, importer=IMPORTER, origin=plain(str(path)), options=options) as writer:
        episodes = _StagedEpisodes(writer)
        models = tasks_by_model(folders)
        for number, folder in enumerate(folders, 1):
            if as_evaluations:
                _import_evaluation(writer, episodes, folder, root, tasks, models[folder.parent.parent])
            else:
                _import_attempt(writer, episodes, folder, root, tasks)
            if on_progress is not None:
                on_progress(number, len(folders))
        parts = episodes.finish()
        summary = writer.finish(num_episodes=episodes.num_episodes)
        episodes.publish(TrajectoryStore(state), parts)
        publish(state, writer)
    return summary


class _StagedEpisodes:
    """Episodes in a temporary store inside the hidden folder, until the whole import has succeeded."""

    def __init__(self, writer: ImportWriter) -> None:
        self._prefix = f"import-{writer.options.name}-"
        self._root = writer.folder / "staged"
        self._store = TrajectoryStore(StateDir(self._root))
        self._waiting: list[Episode] = []
        self._parts: list[str] = []
        self._images: dict[str, tuple[Path, str]] = {}
        self.num_episodes = 0

    def add(self, episode: Episode, screens: Sequence[ProvenImage]) -> None:
        for screen in screens:
            assert screen.path is not None, screen
            self._images[screen.sha256] = (screen.path, screen.suffix)
        self._waiting.append(episode)
        self.num_episodes += 1
        if len(self._waiting) == EPISODES_PER_PART:
            self._flush()

    def finish(self) -> list[str]:
        if self._waiting:
            self._flush()
        return self._parts

    def publish(self, store: TrajectoryStore, parts: Sequence[str]) -> None:
        """Moves the images first, which no query sees, then the few small parts. A part that only an older import of
        that name had is rewritten as empty."""
        for path, suffix in self._images.values():
            store.write_blob(read_regular_file(path, max_bytes=MAX_IMAGE_BYTES), suffix=suffix)
        for part in parts:
            store.write_episodes(part, self._store.read_episodes(part))
        for part in set(store.existing_parts("episodes", self._prefix)) - set(parts):
            store.write_episodes(part, [])
        shutil.rmtree(self._root, ignore_errors=True)

    def _flush(self) -> None:
        part = f"{self._prefix}{len(self._parts):05d}"
        self._store.write_episodes(part, self._waiting)
        self._parts.append(part)
        self._waiting = []


def _import_attempt(writer: ImportWriter, episodes: _StagedEpisodes, folder: Path, root: Path, tasks: Path) -> None:
    relative = plain(folder.relative_to(root).as_posix())
    try:
        attempt = read_attempt(folder)
    except DatasetError as error:
        writer.add_reject(
            BadRecord(kind="malformed", reason=str(error)), path=relative, line=0, task_id=plain(folder.name)
        )
        return
    task = _find_task(tasks, attempt)
    actions = _actions(attempt)
    screens = [step.screen for step in attempt.steps if step.screen is not None]
    episodes.add(attempt_episode(attempt, task, actions, relative=relative, options=writer.options), screens)
    if attempt.num_earlier_rows:
        reason = f"traj.jsonl has rows of earlier runs, which have no result: {attempt.num_earlier_rows}"
        writer.add_reject(BadRecord(kind="malformed", reason=reason), path=relative, line=1, task_id=attempt.task_id)
    _add_task(writer, task)
    if attempt.score is None or attempt.score < SUCCESS_THRESHOLD:
        return
    try:
        conversation = _conversation(attempt, task, actions)
    except BadRecord as bad:
        writer.add_reject(bad, path=relative, line=0, task_id=attempt.task_id)
        return
    for screen in screens:
        writer.add_image(screen)
    writer.add_demonstration(
        task_id=attempt.task_id,
        messages=conversation.messages,
        images=conversation.images,
        reward=attempt.score,
        source_path=relative,
        source_line=0,
        extra={"engine": attempt.model},
    )


def _import_evaluation(
    writer: ImportWriter, episodes: _StagedEpisodes, folder: Path, root: Path, tasks: Path, played: Sequence[str]
) -> None:
    """`played`: all tasks that the model has an attempt at."""
    relative = plain(folder.relative_to(root).as_posix())
    attempt = with_original_task_id(read_result(folder))
    task = _find_task(tasks, attempt)
    episode = attempt_episode(attempt, task, _actions(attempt), relative=relative, options=writer.options)
    screens = [step.screen for step in attempt.steps if step.screen is not None]
    episodes.add(as_evaluation(episode, attempt, options=writer.options, tasks=played), screens)
    _add_task(writer, task)


def _add_task(writer: ImportWriter, task: Task | None) -> None:
    if task is not None:
        writer.add_task(
            task_id=task.task_id, instruction=task.instruction, domain=task.domain, config=task.config or None
        )


def _find_task(tasks: Path, attempt: ResultAttempt) -> Task | None:
    """The attempt's task from its file in the OSWorld tree; None without a readable file or an instruction."""
    path = tasks / attempt.domain / f"{attempt.task_id}.json"
    if not path.is_file():
        elsewhere = [found for found in tasks.glob("*/*.json") if found.stem == attempt.task_id]
        path = elsewhere[0] if len(elsewhere) == 1 else path
    try:
        config = read_exactly(read_regular_file(path))
    except (OSError, BadRecord):
        return None
    instruction = config.get("instruction") if isinstance(config, dict) else None
    if not isinstance(instruction, str) or not instruction.strip():
        return None
    return Task(task_id=attempt.task_id, instruction=instruction, domain=attempt.domain, config=config)


def _actions(attempt: ResultAttempt) -> list[StepActions]:
    """The actions of each step, or the reason that they cannot be expressed."""
    sizes = [(step.screen.width, step.screen.height) for step in attempt.steps if step.screen is not None]
    pointer = Pointer()
    found: list[StepActions] = []
    for step in attempt.steps:
        size = (step.screen.width, step.screen.height) if step.screen else sizes[0] if sizes else None
        try:
            found.append(
                StepActions(actions=tuple(actions_of(read_code(step.image_action), _on_screen(size), pointer)))
            )
        except ActionParseError as error:
            found.append(StepActions(problem=str(error)))
            pointer = Pointer()
    return found


def _on_screen(size: tuple[int, int] | None) -> ToPixels:
    def to_pixels(x: float, y: float) -> tuple[int, int]:
        point = round(x), round(y)
        if min(point) < 0 or (size is not None and (point[0] >= size[0] or point[1] >= size[1])):
            screen = f"the screen of {size[0]}x{size[1]}" if size else "any screen"
            raise ActionParseError(f"the point ({x:g}, {y:g}) is outside {screen}")
        return point

    return to_pixels


def _conversation(attempt: ResultAttempt, task: Task | None, actions: Sequence[StepActions]) -> Conversation:
    """Raises BadRecord: an unknown task, missing steps, a missing screen, or an action that cannot be expressed."""
    if task is None:
        raise BadRecord(
            kind="bad_task",
            reason=f"no instruction is known for task {attempt.task_id}: give its OSWorld checkout with --osworld-path",
        )
    if attempt.problems:
        raise BadRecord(kind="malformed", reason=f"the attempt is incomplete: {attempt.problems[0]}")
    conversation = Conversation(task=task)
    for step, found in zip(attempt.steps, actions, strict=True):
        if step.screen_problem:
            raise BadRecord(kind="bad_image", reason=f"step {step.number}: {step.screen_problem}")
        if found.problem:
            raise BadRecord(kind="dropped_parse", reason=f"step {step.number}: {found.problem}")
        image = step.screen.name if step.screen is not None else None
        conversation.add_step(image, found.actions, said=_words(step.response))
    return conversation


def _words(response: str) -> str:
    """The model's text besides its code; empty if it wrote only code."""
    outside = "".join(response.split("```")[::2]).strip()
    return "" if "pyautogui." in outside or outside in ("WAIT", "DONE", "FAIL") else outside
