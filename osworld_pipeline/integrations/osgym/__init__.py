"""OSGym's data engine on our store and env client: a replay buffer of steps, a dataloader with one process per
environment, a torch dataset, and the desktop as a Gymnasium environment."""
