"""A GSPO phase: rollouts, batches, updates."""
