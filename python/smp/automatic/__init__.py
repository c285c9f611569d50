"""Chooses a layout for the devices that are there, and makes model and optimizer for it."""

from smp.automatic.ready import auto as auto
