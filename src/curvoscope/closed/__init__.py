"""Closed forms inside a model: which layers have one, and the layers rebuilt from its weights."""
