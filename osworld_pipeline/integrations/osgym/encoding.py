"""Prompts as token ids and image inputs, with any tokenizer and processor of Hugging Face's interface.

A screenshot is encoded once, by the processor itself, which determines its number of tokens. A prompt that is too long
loses its oldest screenshots completely, so that placeholders and pixels always agree.
"""

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from osworld_pipeline.agent.model_inputs import rope_positions
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.pictures import open_picture
from osworld_pipeline.integrations.osgym.prompts import Markup, Prompt, without_oldest

TEXT_KEYS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
"""Keys of a processor's result that belong to the text; the others belong to the image."""


@dataclass(frozen=True, kw_only=True)
class EncodedImage:
    token_ids: tuple[int, ...]
    """The image's tokens in a prompt, with placeholders expanded."""
    inputs: Mapping[str, torch.Tensor]
    """The model's other inputs (pixel_values, image_grid_thw, ...), with images along the first axis."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.inputs.values())


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    token_ids: tuple[int, ...]
    raw_token_ids: tuple[int, ...]
    """The same with each image's text unexpanded, for an engine that expands it itself."""
    images: tuple[bytes, ...]
    """Encoded images in the order of their placeholders."""


class PromptEncoder:
    """Holds a tokenizer, an optional processor, and the pixel values of the newest screenshots."""

    def __init__(
        self,
        tokenizer: Any,
        processor: Any = None,
        *,
        max_length: int,
        image_text: str | None = None,
        cache_bytes: int = 1 << 30,
    ) -> None:
        """`image_text`: the text of one image in a prompt for this processor; None uses its image token, between its
        vision tokens if it has them.

        Raises:
            ValueError: the tokenizer has no padding token.
        """
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token: set tokenizer.pad_token")
        self.tokenizer, self.processor = tokenizer, processor
        self.max_length = max_length
        self._image_text = image_text
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[str, EncodedImage] = OrderedDict()
        self._num_cached_bytes = 0

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """The prompt, or the part of it that fits `max_length`: the task, and the newest screenshots completely. If the
        prompt has no screenshots: the task and the newest texts, or only the last tokens.

        Raises:
            ValueError: not even the task and the newest screenshot fit, or there are images and no processor.
        """
        encoded = self._encode_all(prompt)
        while len(encoded.token_ids) > self.max_length:
            shorter = without_oldest(prompt)
            if shorter is None:
                return self._end_of(encoded)
            prompt, encoded = shorter, self._encode_all(shorter)
        return encoded

    def encode_image(self, image: bytes) -> EncodedImage:
        """
        Raises:
            ValueError: there is no processor.
        """
        key = digest_bytes(image)
        found = self._cached.get(key)
        if found is not None:
            self._cached.move_to_end(key)
            return found
        found = self._process(image)
        self._cached[key] = found
        self._num_cached_bytes += found.num_bytes
        while self._num_cached_bytes > self._cache_bytes and len(self._cached) > 1:
            _, dropped = self._cached.popitem(last=False)
            self._num_cached_bytes -= dropped.num_bytes
        return found

    def image_inputs(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """A model's inputs for these images together; empty without images.

        Raises:
            ValueError: this processor's inputs cannot hold images of different sizes together.
        """
        encoded = [self.encode_image(image).inputs for image in images]
        if not encoded:
            return {}
        for key in encoded[0]:
            shapes = {tuple(inputs[key].shape[1:]) for inputs in encoded}
            if len(shapes) > 1:
                raise ValueError(
                    f"the screenshots of one prompt make {key} of different shapes {sorted(shapes)}, which this "
                    f"{type(self.processor).__name__} cannot combine: make the environment send one size"
                )
        return {key: torch.cat([inputs[key] for inputs in encoded]) for key in encoded[0]}

    def positions(self, token_ids: Sequence[int], image_inputs: Mapping[str, torch.Tensor]) -> np.ndarray:
        """(T,) for a model with 1D positions, (3, T) for Qwen-VL's, with time, height and width."""
        if not self.has_rope_positions:
            return np.arange(len(token_ids), dtype=np.int64)
        grids = image_inputs.get("image_grid_thw")
        return rope_positions(self.processor, token_ids, [] if grids is None else list(grids.numpy()))

    @property
    def has_rope_positions(self) -> bool:
        return hasattr(getattr(self.processor, "image_processor", None), "merge_size")

    @functools.cached_property
    def image_text(self) -> str:
        """One image in a prompt, as text."""
        if self._image_text is not None:
            return self._image_text
        start, end = (getattr(self.processor, f"vision_{side}_token", "") for side in ("start", "end"))
        return f"{start}{self.processor.image_token}{end}"

    @functools.cached_property
    def _image_text_ids(self) -> list[int]:
        return self._tokens(Markup(self.image_text))

    def _encode_all(self, prompt: Prompt) -> EncodedPrompt:
        ids: list[int] = []
        raw_ids: list[int] = []
        images: list[bytes] = []
        for part in prompt:
            if isinstance(part, str):
                found = self._tokens(part)
                ids += found
                raw_ids += found
                continue
            images.append(part)
            ids += self.encode_image(part).token_ids
            raw_ids += self._image_text_ids
        return EncodedPrompt(token_ids=tuple(ids), raw_token_ids=tuple(raw_ids), images=tuple(images))

    def _end_of(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """The longest end of the prompt that fits; an image is never cut."""
        if prompt.images:
            raise ValueError(
                f"the task and one screenshot take {len(prompt.token_ids)} tokens, more than max_prompt_length "
                f"({self.max_length}): raise it, or make the screenshots smaller"
            )
        newest = prompt.token_ids[-self.max_length :]
        return EncodedPrompt(token_ids=newest, raw_token_ids=newest, images=())

    def _tokens(self, text: str) -> list[int]:
        is_plain = not isinstance(text, Markup)
        # A tokenizer accepts any string; the subclass only marks special tokens.
        return list(self.tokenizer(str(text), add_special_tokens=False, split_special_tokens=is_plain)["input_ids"])

    def _process(self, image: bytes) -> EncodedImage:
        if self.processor is None:
            raise ValueError("the environment shows images, and the dataloader has no processor for them")
        with open_picture(image) as opened:
            outputs = self.processor(
                text=[self.image_text], images=[opened.convert("RGB")], return_tensors="pt", add_special_tokens=False
            )
        return EncodedImage(
            token_ids=tuple(outputs["input_ids"][0].tolist()),
            inputs={key: value for key, value in outputs.items() if key not in TEXT_KEYS},
        )
