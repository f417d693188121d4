"""The sources: their theorems, literally, their experiments and figures, their networks and tasks."""
