"""Saves and loads single files, and checkpoints of whole jobs that load on any layout."""

from smp.checkpoint.files import load, save
from smp.checkpoint.handle import SaveHandle
from smp.checkpoint.loading import resume_from_checkpoint
from smp.checkpoint.saving import save_checkpoint, wait_for_uploads

__all__ = [
    "SaveHandle",
    "load",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "wait_for_uploads",
]
