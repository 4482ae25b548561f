"""One episode on a leased desktop: set-up, actions, waiting, and the table of live episodes."""
