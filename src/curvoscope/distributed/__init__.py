"""Models and batches that are spread over several processes."""
