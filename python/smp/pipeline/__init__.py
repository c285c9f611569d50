"""Calls between modules of different pipeline ranks."""

from smp.pipeline.link import PipelineLink

__all__ = ["PipelineLink"]
