"""What the model sees and says: dialects, prompts, observation text, images, and the rendering of it all as tokens."""
