"""sglang's own server, adapted so that it imports on a CPU. cpu_server.py has the required settings.

sglang spawns its other processes by importing this file again, so its declarations apply to all of them.
"""

import contextlib
import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - another environment than the pipeline's


def declare_torchvision_operators() -> None:
    """torchvision from a package index is built for CUDA: its operators do not load with a CPU build of torch, and its
    import fails if they are not declared."""
    spec = importlib.util.find_spec("torchvision")
    folders = (spec.submodule_search_locations if spec else None) or []
    for library in [library for folder in folders for library in Path(folder).glob("_C*.so")]:
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(library))
            return
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # If the library object is garbage-collected, its operators are removed.
    declare_torchvision_operators.kept = operators  # type: ignore[attr-defined]


def ignore_pinned_memory() -> None:
    """LoRA pins memory for an accelerator, which a CPU build of torch refuses."""
    for name in ("empty", "empty_like", "ones", "tensor", "zeros"):
        make = getattr(torch, name)

        @functools.wraps(make)
        def unpinned(*arguments: Any, make: Any = make, pin_memory: bool = False, **options: Any) -> Any:
            return make(*arguments, **options)

        setattr(torch, name, unpinned)
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


declare_torchvision_operators()
ignore_pinned_memory()

if __name__ == "__main__":
    import os
    import sys

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
