"""Rounds of rollouts and fine-tuning, and when to train again."""
