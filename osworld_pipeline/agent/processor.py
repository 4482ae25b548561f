"""Loads a Qwen3-VL processor (tokenizer and image processor), with torchvision or without it.

The stock class requires a video processor, which requires torchvision. No videos are used here, so without torchvision
a subclass without that part takes its place; files and token ids are the same.
"""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.adapters import find_adapter
from osworld_pipeline.errors import StoreError

PLACEHOLDERS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
TOKENIZER_FILE = "tokenizer.json"
VIDEO_FILE = "video_preprocessor_config.json"
VIDEO_SETTINGS = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"longest_edge": 786_432, "shortest_edge": 131_072},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""The published model's settings, for a checkpoint that is built from scratch."""


@functools.cache
def image_only_processor_class() -> type[Any]:
    """Qwen3VLProcessor without its video part. A function, so that transformers is imported only when needed."""
    from transformers import Qwen3VLProcessor as StockProcessor
    from transformers.processing_utils import ProcessorMixin

    class Qwen3VLProcessor(StockProcessor):
        # The class keeps the stock name because save_pretrained records it for programs that load the checkpoint.
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any
        ) -> None:
            for name, token in PLACEHOLDERS.items():
                setattr(self, name, token)
                setattr(self, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
            self.video_settings = json.dumps(VIDEO_SETTINGS, indent=2)

        def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> Any:
            saved = super().save_pretrained(save_directory, *arguments, **options)
            # A server loads the stock class, which requires its video part even if no video is used.
            (Path(save_directory) / VIDEO_FILE).write_text(self.video_settings)
            return saved

    return Qwen3VLProcessor


def make_processor(image_processor: Any, tokenizer: Any, *, chat_template: str) -> Any:
    """A processor from its parts, for a checkpoint that is being built."""
    return image_only_processor_class()(
        image_processor=image_processor, tokenizer=tokenizer, chat_template=chat_template
    )


def load_processor(path: Path | str) -> Any:
    """The processor of a checkpoint folder, tiny or published; of an adapter that was saved without one, its base's.

    Raises:
        StoreError: the folder is missing or has no processor; names it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise StoreError(f"no checkpoint folder at {folder}: make or download the checkpoint first")
    if not (folder / TOKENIZER_FILE).is_file() and (adapter := find_adapter(folder)) is not None:
        folder = adapter.base_folder
    if importlib.util.find_spec("torchvision") is not None and (folder / VIDEO_FILE).is_file():
        from transformers import Qwen3VLProcessor

        loader: Any = Qwen3VLProcessor
        parts = {}
    else:
        loader = image_only_processor_class()
        parts = {"chat_template": _chat_template(folder)}
    try:
        if parts:
            from transformers import AutoTokenizer
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            tokenizer = AutoTokenizer.from_pretrained(folder)
            image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
            template = parts["chat_template"] or getattr(tokenizer, "chat_template", None)
            processor = loader(image_processor=image_processor, tokenizer=tokenizer, chat_template=template)
            if (folder / VIDEO_FILE).is_file():
                processor.video_settings = (folder / VIDEO_FILE).read_text()
            return processor
        return loader.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"the checkpoint at {folder} holds no usable processor: {str(error).splitlines()[0]}"
        ) from error


def _chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    return file.read_text() if file.is_file() else None


def image_token_count(processor: Any, *, width: int, height: int) -> int:
    """Number of placeholders for an image of this size."""
    image_processor = processor.image_processor
    num_patches = image_processor.get_number_of_image_patches(height, width, {})
    return int(num_patches) // image_processor.merge_size**2
