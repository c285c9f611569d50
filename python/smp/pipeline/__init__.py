"""Calls between modules of different pipeline ranks."""

from smp.pipeline.hub import PipelineHub
from smp.pipeline.module_state import begin_context
from smp.pipeline.remote_modules import RemoteModules
from smp.pipeline.remote_tensor import RemoteTensor, localize, resolve

__all__ = ["PipelineHub", "RemoteModules", "RemoteTensor", "begin_context", "localize", "resolve"]
