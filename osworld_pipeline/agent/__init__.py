"""The model's inputs and outputs: dialects, prompts, observation text, images, and their rendering as tokens."""
