"""What happens: the library behind the Dagster assets. It knows nothing of Dagster, save definitions.py."""
