"""Precisions of weights, by their names in a recipe."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
