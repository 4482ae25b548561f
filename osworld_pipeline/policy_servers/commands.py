"""The commands of the sglang servers that a recipe requests in `[engine.launch]`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.agent.adapters import whole_weights_folder
from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import EngineError
from osworld_pipeline.policy_servers.cpu_server import cpu_server
from osworld_pipeline.recipes import Recipe
from osworld_pipeline.recipes.schema import LaunchSection

ENVIRONMENT_VARIABLE = "SGLANG_ENV"
DEFAULT_ENVIRONMENT = Path("var/sglang")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    url: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to the supervisor's own environment."""


def server_commands(
    recipe: Recipe, checkpoint: Path, *, ports: Sequence[int], environment: Mapping[str, str] | None = None
) -> tuple[ServerCommand, ...]:
    """One command for each of `ports`, on loopback. Each server starts with the whole weights of `checkpoint`; an
    adapter is loaded later, like all other weights.

    `environment`: this process's; None for os.environ.

    Raises:
        EngineError: sglang is not installed in the configured folder, or too few GPUs are visible.
        StoreError: the base of an adapter is missing.
    """
    given = os.environ if environment is None else environment
    section = recipe.engine.launch
    assert section is not None, "checked by the caller"
    folder = Path(given.get(ENVIRONMENT_VARIABLE) or DEFAULT_ENVIRONMENT).resolve()
    _require_sglang(folder, section)
    shared = [
        *(("--model-path", str(whole_weights_folder(checkpoint))) if section.device == "cuda" else ()),
        *("--host", "127.0.0.1", "--log-level", "warning"),
        *_lora_arguments(recipe),
        *section.arguments,
    ]
    added = {"SGLANG_VLM_CACHE_SIZE_MB": "0"} if recipe.trainer.train_vision else {}
    commands = []
    for number, port in enumerate(ports):
        url = f"http://127.0.0.1:{port}"
        if section.device == "cpu":
            server = cpu_server(
                folder, whole_weights_folder(checkpoint), [*shared, "--port", str(port)], {**given, **added}
            )
            arguments, own = server.arguments, {**server.environment, **added}
        else:
            python = (str(folder / "bin" / "python"), "-m", "sglang.launch_server")
            parallel = ("--tp-size", str(section.gpus_per_server))
            arguments = (*python, *shared, *parallel, *_dtype_arguments(recipe), "--port", str(port))
            own = {**added, VISIBLE_GPUS: ",".join(gpus_of_server(recipe, number, given.get(VISIBLE_GPUS)))}
        commands.append(ServerCommand(url=url, arguments=arguments, environment=own))
    return tuple(commands)


def gpus_of_server(recipe: Recipe, number: int, visible: str | None) -> tuple[str, ...]:
    """The GPUs of server `number`: those after the trainer's, unless `first_gpu` is set. `visible`: the value of
    CUDA_VISIBLE_DEVICES, by which they are numbered.

    Raises:
        EngineError: too few GPUs are visible.
    """
    section = recipe.engine.launch
    assert section is not None, "checked by the caller"
    first = recipe.trainer.num_processes if section.first_gpu is None else section.first_gpu
    begin = first + number * section.gpus_per_server
    wanted = range(begin, begin + section.gpus_per_server)
    if visible is None:
        return tuple(map(str, wanted))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if wanted.stop > len(names):
        raise EngineError(
            f"engine.launch places policy server {number + 1} on GPU {wanted.stop - 1}, and the number "
            f"of GPUs in {VISIBLE_GPUS} is {len(names)}: lower engine.launch.num_servers, or set "
            "engine.launch.first_gpu"
        )
    return tuple(names[index] for index in wanted)


def _dtype_arguments(recipe: Recipe) -> tuple[str, ...]:
    """Logits in float32 as the trainer's (agent/logits.py)."""
    dtype = recipe.model.dtype if recipe.model.kind == "pretrained" else "float32"
    return ("--dtype", dtype) if dtype == "float32" else ("--dtype", dtype, "--enable-fp32-lm-head")


def _lora_arguments(recipe: Recipe) -> tuple[str, ...]:
    lora = recipe.trainer.lora
    if lora is None:
        return ()
    return ("--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *lora.target_modules)


def _require_sglang(folder: Path, section: LaunchSection) -> None:
    if not (folder / "bin" / "python").exists():
        install = f"run `{how_to_set_up('sglang')}`"
        remedy = install if section.device == "cpu" else "install sglang in a Python environment there"
        raise EngineError(
            f"engine.launch starts sglang servers, and there is no sglang at {folder}: {remedy}, or set "
            f"{ENVIRONMENT_VARIABLE} to the folder of an environment with sglang"
        )
