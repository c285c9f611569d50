"""Saving and loading: single files, and checkpoints of whole jobs that load on any layout."""

from smp.checkpoint.files import load, save

__all__ = ["load", "save"]
