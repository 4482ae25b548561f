"""The pool of the steps that evaluate or collect. By default it is the pool of the trainings, so that these steps and
trainings take turns on one GPU. If separate servers sample for the steps, OSWORLD_EVALUATION_POOL names another pool;
then milestones are evaluated during training."""

import os

TRAINER = "trainer"
EVALUATION_POOL_VARIABLE = "OSWORLD_EVALUATION_POOL"
EVALUATION = os.environ.get(EVALUATION_POOL_VARIABLE) or TRAINER
"""Read at import, because the decorators of the assets need it."""
