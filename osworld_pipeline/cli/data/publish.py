"""`publish dataset|checkpoint|results`: to a Hugging Face hub, with licences, hashes and lineage in the card."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, existing_state
from osworld_pipeline.cli.progress import shown_progress
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from osworld_pipeline.publishing.publication import Publication

publishing = typer.Typer(
    help="Push to a Hugging Face hub (HF_ENDPOINT, token in HF_TOKEN); everything pushed needs a licence.",
    no_args_is_help=True,
)

Repo = Annotated[str, typer.Option(help="OWNER/NAME; created if missing.")]
Licence = Annotated[str | None, typer.Option(help="Licence by its name on the hub: apache-2.0, mit, ...")]
Private = Annotated[bool, typer.Option("--private", help="Create the repository as private.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be pushed, without pushing.")]


def register(app: typer.Typer) -> None:
    app.add_typer(publishing, name="publish")


@publishing.command()
def dataset(
    target: Annotated[Path, typer.Argument(help="The folder of an export: huggingface, parquet or lance.")],
    repo: Repo,
    private: Private = False,
    dry_run: DryRun = False,
    as_json: JsonOption = False,
) -> None:
    """Publish an export as a dataset; its licences are those of its rows."""
    from osworld_pipeline.publishing.dataset import plan_dataset

    with shown_progress("publish dataset", as_json=as_json) as on_progress:
        plan = plan_dataset(target, on_progress)
    _publish(plan, repo, is_private=private, is_dry_run=dry_run, as_json=as_json)


@publishing.command()
def checkpoint(
    target: Annotated[str, typer.Argument(help="The id of a checkpoint.")],
    repo: Repo,
    licence: Licence = None,
    source_licence: Annotated[
        list[str] | None, typer.Option(help="NAME=LICENCE of a source of training data, or of a base; repeatable.")
    ] = None,
    private: Private = False,
    dry_run: DryRun = False,
    state: StateOption = Path("var"),
    as_json: JsonOption = False,
) -> None:
    """Publish a checkpoint as a model, with its lineage, training data and scores."""
    from osworld_pipeline.publishing.checkpoint import plan_checkpoint

    stated: dict[str, str] = {}
    for text in source_licence or ():
        name, _, value = text.partition("=")
        if not name.strip() or not value.strip():
            raise typer.BadParameter(f"--source-licence must be NAME=LICENCE, not {text!r}")
        stated[name.strip()] = value.strip()
    folder = existing_state(state)
    with shown_progress("publish checkpoint", as_json=as_json) as on_progress:
        plan = plan_checkpoint(folder, target, licence=licence, source_licences=stated, on_progress=on_progress)
    _publish(plan, repo, is_private=private, is_dry_run=dry_run, as_json=as_json)


@publishing.command()
def results(
    target: Annotated[Path, typer.Argument(help="A result file of `evaluate --output`, or a folder of them.")],
    repo: Repo,
    licence: Licence = None,
    private: Private = False,
    dry_run: DryRun = False,
    as_json: JsonOption = False,
) -> None:
    """Publish result files of evaluations as a dataset with one table."""
    from osworld_pipeline.publishing.results import plan_results

    _publish(plan_results(target, licence=licence), repo, is_private=private, is_dry_run=dry_run, as_json=as_json)


def _publish(plan: "Publication", repo: str, *, is_private: bool, is_dry_run: bool, as_json: bool) -> None:
    from osworld_pipeline.publishing.hub import need_repo, push, token_from
    from osworld_pipeline.publishing.publication import CARD

    files = plan.all_files()
    if is_dry_run:
        need_repo(repo)
        listed = [{"path": file.path, "num_bytes": file.num_bytes, "sha256": file.sha256} for file in files]
        card = next(file.content for file in files if file.path == CARD)
        text = card.decode() if isinstance(card, bytes) else card.read_text()
        if as_json:
            print_json(
                {"repo": repo, "repo_type": plan.repo_type, "licence": plan.licence, "files": listed, "card": text}
            )
            return
        print(f"would push to the {plan.repo_type} {repo}, {plan.licence}:")
        for file in files:
            print(f"{file.num_bytes:>15,}  {file.path}")
        print(f"\n{text}", end="")
        return
    token = token_from()
    with shown_progress("publish", as_json=as_json) as on_progress:
        done = push(plan, repo, token=token, is_private=is_private, on_progress=on_progress)
    if as_json:
        print_json(done)
    elif done.is_changed:
        removed = f", {done.num_removed} of an earlier publication removed" if done.num_removed else ""
        print(f"{repo}: {done.num_files:,} files under {plan.licence} in commit {done.commit}{removed}")
    else:
        print(f"{repo} already has all {done.num_files:,} files; no commit was made")
