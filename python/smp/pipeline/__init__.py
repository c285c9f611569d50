"""Calls between modules of different pipeline ranks."""

from smp.pipeline.link import PipelineLink
from smp.pipeline.remote_tensor import RemoteTensor, localize, resolve

__all__ = ["PipelineLink", "RemoteTensor", "localize", "resolve"]
