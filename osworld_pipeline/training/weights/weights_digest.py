"""The digest that identifies the weights of a checkpoint folder; needs no torch."""

import hashlib
from pathlib import Path

from osworld_pipeline.agent.adapters import find_adapter
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.errors import StoreError
from osworld_pipeline.training.weights.manifest import file_digests


def weights_digest(folder: Path) -> str:
    """SHA-256 (hex) of model.safetensors; of the shards' names and digests if there are several; for an adapter
    checkpoint that of its base, its factors and their scale together.

    Raises:
        StoreError: there are no safetensors weights, or an adapter's base is missing.
    """
    adapter = find_adapter(folder)
    if adapter is not None:
        return digest_json(
            {
                "base": adapter.base_digest or weights_digest(adapter.base_folder),
                "factors": file_digests([adapter.weights])[adapter.weights],
                "rank": adapter.rank,
                "alpha": adapter.alpha,
            }
        )
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise StoreError(f"no model.safetensors in {folder}: this is not a checkpoint in Hugging Face format")
    digests = {path.name: digest for path, digest in sorted(file_digests(files).items())}
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()
