"""MLflow: one run a stage, one LoggedModel a checkpoint, linked to its parent."""
