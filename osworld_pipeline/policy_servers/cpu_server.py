"""The command of an sglang server on a CPU: sglang's own, adapted by sglang_cpu/serve.py, with the settings that it
needs there. It is ready in about a minute."""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from osworld_pipeline.domain.remedies import how_to_set_up
from osworld_pipeline.errors import EngineError
from osworld_pipeline.programs.addresses import url_at

_FOLDER = resources.files("osworld_pipeline.policy_servers") / "sglang_cpu"
_DEFAULTS: Mapping[str, str] = {
    # With more threads than free cores, spinning threads make a token take a hundred times as long.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # After a new vision tower is loaded, the cache would return features of the old one.
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
}
# Without `--prefill-max-requests 1`, eight prompts with images take ten times as long as the same prompts in sequence.
_ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--mm-attention-backend", "sdpa", "--lora-backend", "torch_native", "--disable-overlap-schedule"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "32768", "--prefill-max-requests", "1"),
)


@dataclass(frozen=True, kw_only=True)
class CpuServer:
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables to add."""

    @property
    def url(self) -> str:
        """The URL at which the server will listen. A host or port that is not given has sglang's default."""
        parser = ArgumentParser(add_help=False)
        parser.add_argument("--host", nargs="?", default="127.0.0.1")
        parser.add_argument("--port", nargs="?", default="30000")
        given, _ = parser.parse_known_args(self.arguments)
        return url_at(given.host, given.port)


def cpu_server(folder: Path, checkpoint: Path, more: Sequence[str], environment: Mapping[str, str]) -> CpuServer:
    """`folder`: the Python environment with sglang. `more`: further arguments of sglang; if one is repeated, its last
    value is used. `environment`: the caller's variables, which override the defaults here.

    Raises:
        EngineError: there is no such environment.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        raise EngineError(
            f"there is no sglang at {folder}: run `{how_to_set_up('sglang')}`, or name its folder in SGLANG_ENV"
        )
    kept = {name: value for name in _DEFAULTS if (value := environment.get(name))}
    path = ":".join(filter(None, (str(_FOLDER / "stubs"), environment.get("PYTHONPATH"))))
    return CpuServer(
        arguments=(str(python), str(_FOLDER / "serve.py"), *_ARGUMENTS, "--model-path", str(checkpoint), *more),
        environment={**_DEFAULTS, **kept, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path},
    )
