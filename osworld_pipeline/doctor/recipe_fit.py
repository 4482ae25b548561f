"""The GPU and host memory that a recipe needs, item by item, compared with the local or the named GPU."""

import shutil

from rich.console import Console
from rich.table import Table

from osworld_pipeline.doctor.machine import NVIDIA_LIMIT_S
from osworld_pipeline.doctor.programs import ask
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.training.memory.estimate import GB
from osworld_pipeline.training.memory.fit import Fit, judge
from osworld_pipeline.training.memory.model_shapes import shape_of


def judge_recipe(recipe: Recipe, *, gpu_gb: float | None) -> Fit:
    """`gpu_gb`: memory of one GPU; default: the smallest GPU of this machine, if there is one.

    Raises:
        RecipeError: the size of the recipe's model is unknown.
        StoreError: its folder lacks the sizes.
    """
    shape = shape_of(recipe.model)
    if shape is None:
        raise RecipeError(
            f"the size of {getattr(recipe.model, 'path', 'this model')} is not known here: download it, and set "
            "model.path to its folder"
        )
    gpu_bytes = present_gpu_bytes() if gpu_gb is None else int(gpu_gb * GB)
    return judge(recipe, shape, gpu_bytes=gpu_bytes)


def present_gpu_bytes(*, limit_s: float = NVIDIA_LIMIT_S) -> int | None:
    """Memory of the smallest local GPU; None if there is none."""
    return min(_present_gpus(limit_s), default=None)


def lack_of_gpus(recipe: Recipe) -> str:
    """A sentence about the GPUs that the trainer and its servers need and this machine lacks. Empty if there are
    enough; a tiny model trains on a CPU."""
    num_ranks, num_here = recipe.trainer.num_processes, len(_present_gpus(NVIDIA_LIMIT_S))
    launch = recipe.engine.launch
    num_sampling = launch.num_servers * launch.gpus_per_server if launch and launch.device == "cuda" else 0
    if recipe.model.kind == "tiny" or num_here >= num_ranks + num_sampling:
        return ""
    wanted = "1 GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
    wanted += f" and samples on {num_sampling} more" if num_sampling else ""
    return (
        f"{recipe.name} trains on {wanted}, and this machine has {num_here or 'none'}: set trainer.num_processes, "
        "or give --gpu-memory GB to plan for another machine"
    )


def _present_gpus(limit_s: float) -> list[int]:
    """Memory in bytes of each local GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    said = ask(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], limit_s=limit_s)
    sizes = [int(line) << 20 for line in said.stdout.split() if line.isdigit()]
    return [] if said.status else sizes


def show_fit(fit: Fit, console: Console) -> None:
    """One row per item with the GPU and host memory of one rank, and the verdict."""
    table = Table(pad_edge=False, box=None)
    table.add_column(f"{fit.recipe.name}, {fit.estimate.stage}: memory of one rank")
    table.add_column("GPU, GB", justify="right")
    table.add_column("host, GB", justify="right")
    table.add_column("how", overflow="fold")
    for item in fit.estimate.items:
        table.add_row(item.name, _shown(item.gpu_bytes), _shown(item.host_bytes), item.how)
    table.add_row("[bold]total[/]", _shown(fit.estimate.gpu_bytes), _shown(fit.estimate.host_bytes), "")
    console.print()
    console.print(table)
    console.print()
    colour = "green" if fit.is_ok else "red"
    console.print(f"[{colour}]{fit.sentence}[/]", highlight=False, soft_wrap=True)
    for remedy in fit.remedies:
        console.print(f"  → {remedy.text}: {remedy.gpu_bytes / GB:.1f} GB", highlight=False, soft_wrap=True)
    if not fit.is_ok and not fit.remedies:
        console.print(f"  → {fit.advice}", highlight=False, soft_wrap=True)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f}" if num_bytes else ""
