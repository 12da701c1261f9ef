"""The model families that can be served."""
