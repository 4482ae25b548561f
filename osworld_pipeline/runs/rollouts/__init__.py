"""What a program needs to run episodes: engine, env servers, store, Ray actors."""
