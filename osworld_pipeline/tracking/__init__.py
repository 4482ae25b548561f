"""MLflow: one run per stage, one LoggedModel per checkpoint, linked to its parent."""
