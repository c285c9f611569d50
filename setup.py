"""The one fact that ``setup.cfg`` cannot hold.

The extension fits one minor release of torch, so a wheel asks for the release it is built with.
"""

from importlib.metadata import version

from setuptools import setup

major, minor = version("torch").split("+")[0].split(".")[:2]
setup(install_requires=[f"torch=={major}.{minor}.*", "PyYAML"])
