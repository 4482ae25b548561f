"""`export`: rows and checkpoints in the formats of other programs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, existing_state
from osworld_pipeline.cli.progress import counter, shown_progress
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from osworld_pipeline.datasets.exporters.lake import LakeFormat
    from osworld_pipeline.datasets.exporters.selection import OnProgress, Selection

exports = typer.Typer(
    help="Write rows and checkpoints in the formats of other programs.", no_args_is_help=True, suggest_commands=False
)

Output = Annotated[Path, typer.Argument(help="The folder to create.")]
Checkpoints = Annotated[
    list[str] | None, typer.Option("--checkpoint", help="Only episodes of this checkpoint; repeatable.")
]
Where = Annotated[str | None, typer.Option(help="Only rows for which this SQL condition holds.")]
MinReward = Annotated[float | None, typer.Option(help="Only rows whose raw task reward is at least this.")]
Licences = Annotated[str | None, typer.Option("--licence-only", help="Only rows of these licences, comma-separated.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace an earlier export at OUTPUT.")]
OwnLicence = Annotated[str | None, typer.Option(help="Licence of the episodes of this pipeline.")]
MaxFileMb = Annotated[int, typer.Option("--max-file-mb", min=1, help="Approximate maximum size of a file.")]


def register(app: typer.Typer) -> None:
    app.add_typer(exports, name="export")


@exports.command()
def slime(
    output: Output,
    state: StateOption = Path("var"),
    checkpoint: Checkpoints = None,
    where: Where = None,
    min_reward: MinReward = None,
    licence_only: Licences = None,
    online: Annotated[
        bool, typer.Option("--online", help="Also export the successes of training, as chat turns.")
    ] = False,
    system_prompt: Annotated[str, typer.Option(help="System prompt of online rows: full or short.")] = "full",
    dialect: Annotated[str, typer.Option(help="Dialect of the system prompt of online rows.")] = "slime",
    replace: Replace = False,
    as_json: JsonOption = False,
) -> None:
    """Slime-OSWorld's replay JSONL and task Parquets; --where is over the `replay` view."""
    from osworld_pipeline.datasets.exporters.slime import export_slime
    from osworld_pipeline.dialects import load_dialect

    try:
        prompt = load_dialect(dialect).system_prompt(system_prompt)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with _progress_bar(as_json) as on_progress:
        done = export_slime(
            existing_state(state),
            output,
            system_prompt=prompt,
            selection=_selection(checkpoint, where, min_reward, licence_only),
            with_online=online,
            replace=replace,
            on_progress=on_progress,
        )
    if as_json:
        print_json({"output": output, **asdict(done)})
        return
    print(
        f"{output}: {done.num_demonstrations:,} demonstrations, {done.num_online:,} online successes, "
        f"{done.num_images:,} images; {done.num_tasks:,} tasks, {done.num_train_tasks:,} to train on"
    )


@exports.command("osworld-results")
def osworld_results(
    output: Output,
    state: StateOption = Path("var"),
    checkpoint: Checkpoints = None,
    where: Where = None,
    min_reward: MinReward = None,
    replace: Replace = False,
    as_json: JsonOption = False,
) -> None:
    """OSWorld's result folders of evaluation episodes; --where is over the `evals` view."""
    from osworld_pipeline.datasets.exporters.osworld_results import export_osworld_results

    with _progress_bar(as_json) as on_progress:
        done = export_osworld_results(
            existing_state(state),
            output,
            selection=_selection(checkpoint, where, min_reward, None),
            replace=replace,
            on_progress=on_progress,
        )
    if as_json:
        print_json({"output": output, **asdict(done)})
        return
    print(
        f"{output}: {done.num_episodes:,} episodes of {len(done.models):,} models, {done.num_successes:,} successes of "
        f"{done.num_results:,} results, {done.num_faults:,} faults without a result, {done.num_screenshots:,} "
        "screenshots"
    )


@exports.command()
def huggingface(
    output: Output,
    state: StateOption = Path("var"),
    config: Annotated[
        list[str] | None, typer.Option(help="steps, episodes, sequences or replay; repeatable; default: all.")
    ] = None,
    checkpoint: Checkpoints = None,
    purpose: Annotated[list[str] | None, typer.Option(help="Only episodes of this purpose; repeatable.")] = None,
    where: Where = None,
    min_reward: MinReward = None,
    licence_only: Licences = None,
    own_licence: OwnLicence = None,
    max_shard_mb: Annotated[int, typer.Option(min=1, help="Approximate maximum size of a file.")] = 500,
    replace: Replace = False,
    as_json: JsonOption = False,
) -> None:
    """A Hugging Face dataset (Parquet with images, and a card); --where is over `episodes`, or over `replay`."""
    from osworld_pipeline.datasets.exporters.huggingface import CONFIGS, export_huggingface

    with _progress_bar(as_json) as on_progress:
        done = export_huggingface(
            existing_state(state),
            output,
            selection=_selection(checkpoint, where, min_reward, licence_only, purpose),
            configs=config or CONFIGS,
            own_licence=own_licence,
            max_shard_bytes=max_shard_mb * 1_000_000,
            replace=replace,
            on_progress=on_progress,
        )
    if as_json:
        print_json({"output": output, **asdict(done)})
        return
    rows = ", ".join(f"{number:,} {name}" for name, number in done.num_rows.items())
    print(f"{output}: {rows}; {done.num_images:,} images, {sum(done.num_shards.values()):,} files")
    if done.num_unknown_licence:
        print(f"The licence of {done.num_unknown_licence:,} rows is unknown: {output / 'README.md'} lists them.")


@exports.command()
def areal(
    output: Output,
    processor: Annotated[Path, typer.Option(help="The folder of the checkpoint that sampled the episodes.")],
    state: StateOption = Path("var"),
    checkpoint: Checkpoints = None,
    purpose: Annotated[list[str] | None, typer.Option(help="Only episodes of this purpose; repeatable.")] = None,
    where: Where = None,
    min_reward: MinReward = None,
    licence_only: Licences = None,
    reward: Annotated[
        str, typer.Option(help="Reward of every turn: task, shaped, or group (relative to siblings).")
    ] = "task",
    turn_discount: Annotated[
        float, typer.Option(help="Discount of a turn per later turn; AReaL's example has 0.9.")
    ] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Leave out episodes with a longer turn.")] = None,
    replace: Replace = False,
    as_json: JsonOption = False,
) -> None:
    """AReaL's per-turn tensors (safetensors) of valid episodes; --where is over `episodes`."""
    from typing import get_args

    from osworld_pipeline.datasets.exporters.areal import RewardKind, export_areal

    if reward not in get_args(RewardKind):
        raise typer.BadParameter(f"--reward must be task, shaped or group, not {reward!r}")
    if not 0.0 < turn_discount <= 1.0:
        raise typer.BadParameter("--turn-discount must be above 0 and at most 1")
    with _progress_bar(as_json) as on_progress:
        done = export_areal(
            existing_state(state),
            output,
            processor=processor,
            selection=_selection(checkpoint, where, min_reward, licence_only, purpose),
            reward=cast("RewardKind", reward),
            turn_discount=turn_discount,
            max_tokens=max_tokens,
            replace=replace,
            on_progress=on_progress,
        )
    if as_json:
        print_json({"output": output, **asdict(done)})
        return
    print(
        f"{output}: {done.num_turns:,} turns of {done.num_episodes:,} episodes, {done.num_images:,} images; the "
        f"longest has {done.longest_sequence:,} tokens: set AReaL's max_tokens_per_mb and context_length to at least "
        "that"
    )
    if done.left_out:
        print("Left out: " + ", ".join(f"{number:,} {reason}" for reason, number in done.left_out.items()))


@exports.command()
def parquet(
    output: Output,
    state: StateOption = Path("var"),
    own_licence: OwnLicence = None,
    max_file_mb: MaxFileMb = 500,
    replace: Replace = False,
    as_json: JsonOption = False,
) -> None:
    """All tables as Parquet files, the views over them as SQL, and a manifest with hashes and licences."""
    _export_lake("parquet", output, state, own_licence, max_file_mb, replace=replace, as_json=as_json)


@exports.command()
def lance(
    output: Output,
    state: StateOption = Path("var"),
    own_licence: OwnLicence = None,
    max_file_mb: MaxFileMb = 500,
    replace: Replace = False,
    as_json: JsonOption = False,
) -> None:
    """All tables as Lance datasets, the views over them as SQL, and a manifest; needs the extra 'lance'."""
    _export_lake("lance", output, state, own_licence, max_file_mb, replace=replace, as_json=as_json)


def _export_lake(
    form: "LakeFormat", output: Path, state: Path, own_licence: str | None, max_file_mb: int, *, replace: bool,
    as_json: bool,
) -> None:  # fmt: skip
    from osworld_pipeline.datasets.exporters.lake import export_lake

    with _progress_bar(as_json) as on_progress:
        done = export_lake(
            existing_state(state),
            output,
            form=form,
            own_licence=own_licence,
            max_file_bytes=max_file_mb * 1_000_000,
            replace=replace,
            on_progress=on_progress,
        )
    if as_json:
        print_json({"output": output, **asdict(done)})
        return
    print(
        f"{output}: {sum(done.num_rows.values()):,} rows of {len(done.num_rows)} tables, {done.num_files:,} files, "
        f"{done.num_bytes / 1e6:,.1f} MB"
    )
    if done.num_unknown_licence:
        print(f"The licence of {done.num_unknown_licence:,} rows is unknown: {output / 'export.json'} lists them.")


@exports.command()
def merged(
    checkpoint: Annotated[str, typer.Argument(help="An adapter checkpoint: its id, or its folder.")],
    output: Output,
    dtype: Annotated[str, typer.Option(help="Data type of all weights: float32 or bfloat16.")] = "bfloat16",
    state: StateOption = Path("var"),
    replace: Replace = False,
    as_json: JsonOption = False,
) -> None:
    """A LoRA checkpoint as merged weights (Hugging Face format), with the share of its change lost to rounding."""
    from osworld_pipeline.runs.checkpoints.merged_export import export_merged

    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"--dtype must be float32 or bfloat16, not {dtype!r}")
    folder = existing_state(state)
    with shown_progress("merging weights", as_json=as_json):
        done = export_merged(folder, checkpoint, output, dtype=dtype, replace=replace)
    if as_json:
        print_json({"output": output, **asdict(done)})
        return
    print(
        f"{output}: {done.num_layers:,} layers merged in {dtype}; rounding changed the adapter's contribution by "
        f"{done.rounding_error:.2%}"
    )
    if done.is_far_off:
        way_out = " or use --dtype float32" if dtype == "bfloat16" else ""
        print(
            f"Warning: rounding makes the merged model differ from the trained one. Serve the base with the adapter "
            f"({done.source / 'adapter'}){way_out}."
        )


def _selection(
    checkpoints: list[str] | None,
    where: str | None,
    min_reward: float | None,
    licences: str | None,
    purposes: list[str] | None = None,
) -> "Selection":
    from osworld_pipeline.datasets.exporters.selection import Selection

    names = [name.strip() for name in (licences or "").split(",")]
    return Selection(
        checkpoints=tuple(checkpoints or ()),
        purposes=tuple(purposes or ()),
        min_reward=min_reward,
        licences=tuple(name for name in names if name),
        where=where,
    )


@contextmanager
def _progress_bar(as_json: bool) -> Iterator["OnProgress | None"]:
    with shown_progress("export", as_json=as_json) as show:
        yield counter(show, "writing rows", "rows")
