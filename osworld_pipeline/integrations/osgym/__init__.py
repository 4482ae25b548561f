"""OSGym's data engine over our store and env client (its data server): a replay buffer of steps, a dataloader
that runs one process an environment, a torch dataset, and the desktop as a Gymnasium environment."""
