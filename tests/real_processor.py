"""The real tokenizer for tests, where `scripts/setup tokenizer` has put its ranks."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_tokenizer import RANKS_FILE, build_real_processor


def require_ranks() -> None:
    """Skips where they are missing."""
    if not RANKS_FILE.is_file():
        pytest.skip("the ranks of Qwen's tokenizer are not here (scripts/setup tokenizer)")


def real_processor(folder: Path) -> Any:
    """The published processor, its files in `folder`; skips where the ranks are missing."""
    require_ranks()
    return build_real_processor(folder)
