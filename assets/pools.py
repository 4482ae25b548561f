"""The pool of the steps that evaluate or collect. They take turns with trainings, which is right where both compute on
one GPU. Where servers sample for them, they have a pool of their own, and milestones are evaluated during training."""

import os

TRAINER = "trainer"
EVALUATION_POOL_VARIABLE = "OSWORLD_EVALUATION_POOL"
EVALUATION = os.environ.get(EVALUATION_POOL_VARIABLE) or TRAINER
"""Read at import, because the decorators of the assets need it."""
