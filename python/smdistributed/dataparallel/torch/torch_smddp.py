"""Importing it registers the backend ``smddp`` with `torch.distributed`; that is what it is for."""

from smp.v1.smddp_backend import register

register()
