"""Checkpoints in object stores: sent after they are complete in a folder, fetched as needed."""
