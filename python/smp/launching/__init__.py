"""Starts the other ranks of a job from a plain script or a notebook."""

from smp.launching.launch import launch as launch
