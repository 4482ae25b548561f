"""Teaches a tiny random model to copy from its context, as every published language model can.

A policy copies words of its task into its actions. A random model would have to learn this from demonstrations, which
takes longer than learning everything else in them. Rows of random tokens teach it in seconds: a list, a gap, then a
part of the list again, in which some words have gained or lost the space before them. The rows contain no tasks and no
actions.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

LIST_LENGTH = 14
"""Tokens that may be copied."""
GAP_LENGTH = 3
COPY_LENGTH = 8
NUM_WORDS = 6
"""Number of tokens of the list that have a twin with or without a space before it."""
TWIN_SHARE = 0.3
"""Share of the copied words that are replaced by their twin."""
BATCH_SIZE = 48
LEARNING_RATE = 3e-3
WARMUP_UPDATES = 30
DECAY_SHARE = 0.3
"""The last part of the updates, in which the learning rate falls to a twentieth."""
SPACE = "\u0120"
"""How a byte-level tokenizer writes the space before a word."""


def teach_copying(
    model: Any, tokenizer: Any, *, num_updates: int, seed: int, on_progress: Callable[[int, float], None]
) -> None:
    """Trains the language model in place, without the vision tower. Uses one thread, so that the same seed gives the
    same weights on the same machine. `on_progress` receives the number of updates done and the loss."""
    rows = _CopyingRows(tokenizer, seed=seed)
    weights = [weight for name, weight in model.named_parameters() if "visual" not in name]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.98))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model.train()
    try:
        for update in range(num_updates):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * _rate(update, num_updates)
            ids_BT = torch.tensor([rows.draw() for _ in range(BATCH_SIZE)])
            # The first token of the copy selects the position; later tokens follow from it.
            logits_BTV = model(input_ids=ids_BT, logits_to_keep=COPY_LENGTH).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1), ids_BT[:, -(COPY_LENGTH - 1) :].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            on_progress(update + 1, loss.item())
    finally:
        torch.set_num_threads(num_threads)
        model.eval()


def _rate(update: int, num_updates: int) -> float:
    """Share of the learning rate: a linear warm-up, a plateau, a linear decay."""
    left = (num_updates - update) / max(1.0, DECAY_SHARE * num_updates)
    return min(1.0, (update + 1) / WARMUP_UPDATES, max(0.05, left))


class _CopyingRows:
    def __init__(self, tokenizer: Any, *, seed: int) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        special = set(tokenizer.all_special_ids)
        self._twins = {
            one: other
            for token, index in sorted(vocabulary.items())
            if len(token) > 1 and SPACE + token in vocabulary
            for one, other in ((index, vocabulary[SPACE + token]), (vocabulary[SPACE + token], index))
        }
        self._words: Sequence[int] = sorted(self._twins)
        self._ids: Sequence[int] = sorted(set(vocabulary.values()) - special)
        self._random = random.Random(seed)

    def draw(self) -> list[int]:
        """One row of token ids, always of the same length."""
        draw = self._random
        words = draw.sample(self._words, min(NUM_WORDS, len(self._words)))
        listed = [*words, *draw.sample(self._ids, LIST_LENGTH - len(words))]
        draw.shuffle(listed)
        start = draw.randrange(LIST_LENGTH - COPY_LENGTH)
        copied = [self._copy(token) for token in listed[start : start + COPY_LENGTH]]
        return [*listed, *(draw.choice(self._ids) for _ in range(GAP_LENGTH)), *copied]

    def _copy(self, token: int) -> int:
        return self._twins[token] if token in self._twins and self._random.random() < TWIN_SHARE else token
