"""Starts the other ranks of a job from a plain script or a notebook."""

from smp.launching.first_rank import launch as launch
