"""The licence in the model card of weights from elsewhere."""

from pathlib import Path
from typing import Any

CARD = "README.md"
MAX_BYTES = 2**18
MAX_CHARACTERS = 100
_OTHER = "other"
"""A card with this licence gives its name in `license_name`."""


def card_licence(folder: Path) -> str | None:
    """The `license` in the front matter of the folder's model card; None without a card that can be read and names
    one."""
    import yaml
    from huggingface_hub import metadata_load

    path = folder / CARD
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        found: dict[str, Any] = metadata_load(path) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    licence = found.get("license")
    if licence == _OTHER:
        licence = found.get("license_name", licence)
    return licence if isinstance(licence, str) and 0 < len(licence) <= MAX_CHARACTERS else None
