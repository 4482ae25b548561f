"""Renders chat turns as token ids, in the layout shared by sampling, demonstrations and replay.

    <|im_start|>system\\n{text}<|im_end|>\\n
    <|im_start|>user\\n<|vision_start|><|image_pad|>*n<|vision_end|>{text}<|im_end|>\\n
    <|im_start|>assistant\\n{the sampler's own ids}<|im_end|>\\n

It equals Qwen3-VL's chat template. Text from a desktop or a dataset is encoded with special tokens as plain characters,
so that a terminal showing `<|im_end|>` does not end a turn.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osworld_pipeline.agent.processor import image_token_count
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.pictures import open_picture


@dataclass(frozen=True, kw_only=True)
class RenderedConversation:
    token_ids: tuple[int, ...]
    """Tokens with image placeholders expanded."""
    mask: tuple[int, ...]
    """1 on the assistant's tokens, including the closing <|im_end|>."""
    images: tuple[bytes, ...]
    """The images whose placeholders are in token_ids, in order."""
    num_assistant_turns: int


class Renderer:
    """Renders turns as ids. Holds a processor and no conversation state."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.im_start_id = self._special_id("<|im_start|>")
        self.im_end_id = self._special_id("<|im_end|>")
        self.image_id = self._special_id("<|image_pad|>")
        self.vision_start_id = self._special_id("<|vision_start|>")
        self.vision_end_id = self._special_id("<|vision_end|>")
        self.newline_ids = tuple(self.encode("\n"))
        self.generation_prompt = (self.im_start_id, *self.encode("assistant\n"))

    @functools.cached_property
    def processor_digest(self) -> str:
        """Digest of everything that determines the ids of a text and the pixels of an image."""
        tokenizer = self.tokenizer.backend_tokenizer.to_str()
        settings = json.dumps(self.processor.image_processor.to_dict(), sort_keys=True, default=str)
        template = self.processor.chat_template or ""
        return digest_bytes("\0".join((tokenizer, settings, template)).encode())[:12]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; names of special tokens in it are encoded as characters."""
        if not text:
            return []
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def decode_response(self, token_ids: Sequence[int]) -> str:
        """The response as text, without the token that ended the turn."""
        ids = list(token_ids)
        if ids and ids[-1] == self.im_end_id:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def banned_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Ids below `vocab_size` (rows of the embedding) that a policy never samples: the image and video placeholders,
        which would have no image, and the rows beyond the tokenizer, which have no text. Samplers and the trainer give
        them probability 0."""
        placeholders = (self.image_id, self.processor.video_token_id)
        return (
            *sorted(one for one in placeholders if one is not None),
            *range(len(self.tokenizer), vocab_size),
        )

    def image_ids(self, *, width: int, height: int) -> list[int]:
        count = image_token_count(self.processor, width=width, height=height)
        return [self.vision_start_id, *([self.image_id] * count), self.vision_end_id]

    def turn(self, message: Mapping[str, Any], image_sizes: Sequence[tuple[int, int]] = ()) -> list[int]:
        """A complete system or user turn; `image_sizes`: (width, height) of its images in order.

        Raises:
            ValueError: the numbers of sizes and images differ.
        """
        ids = [self.im_start_id]
        pending = f"{message['role']}\n"
        sizes = iter(image_sizes)
        for part in message["content"]:
            if part["type"] == "text":
                pending += part["text"]
                continue
            size = next(sizes, None)
            if size is None:
                raise ValueError(f"a {message['role']} turn has more image placeholders than images")
            ids += self.encode(pending)
            pending = ""
            ids += self.image_ids(width=size[0], height=size[1])
        if next(sizes, None) is not None:
            raise ValueError(f"a {message['role']} turn has fewer image placeholders than images")
        return [*ids, *self.encode(pending), self.im_end_id, *self.newline_ids]

    def _special_id(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == self.tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {token}: this is not a Qwen3-VL tokenizer")
        return token_id


def render_demonstration(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[bytes],
    *,
    max_tokens: int | None = None,
) -> RenderedConversation:
    """A recorded conversation in the layout above; with `max_tokens`, cut after the last assistant turn that fits.

    `messages` have list content ({type: text|image}); `images` are in placeholder order, already sized for the model.

    Raises:
        ValueError: the numbers of images and placeholders differ, or not even the first assistant turn fits.
    """
    sizes = [image_size(image) for image in images]
    token_ids: list[int] = []
    mask: list[int] = []
    num_images = num_turns = 0
    kept: tuple[int, int, int] | None = None
    for message in messages:
        if message["role"] == "assistant":
            text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
            opening, closing = list(renderer.generation_prompt), list(renderer.newline_ids)
            response = [*renderer.encode(text), renderer.im_end_id]
            token_ids += [*opening, *response, *closing]
            mask += [0] * len(opening) + [1] * len(response) + [0] * len(closing)
            num_turns += 1
            if max_tokens is None or len(token_ids) <= max_tokens:
                kept = (len(token_ids), num_images, num_turns)
            continue
        count = sum(part["type"] == "image" for part in message["content"])
        ids = renderer.turn(message, sizes[num_images : num_images + count])
        num_images += count
        token_ids += ids
        mask += [0] * len(ids)
    if num_images != len(images):
        raise ValueError(f"the conversation has {num_images} image placeholders and {len(images)} images")
    if kept is None:
        if max_tokens is None:
            raise ValueError("the conversation has no assistant turn")
        raise ValueError(f"no assistant turn of the conversation ends within {max_tokens} tokens")
    num_tokens, num_images, num_turns = kept
    return RenderedConversation(
        token_ids=tuple(token_ids[:num_tokens]),
        mask=tuple(mask[:num_tokens]),
        images=tuple(images[:num_images]),
        num_assistant_turns=num_turns,
    )


def image_size(image: bytes) -> tuple[int, int]:
    with open_picture(image) as opened:
        return opened.size
