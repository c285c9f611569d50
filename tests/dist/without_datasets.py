"""Hides the package datasets from transformers 4.30, which needs an older one than is installed.

Processes that find the older transformers import this module first.
"""

from typing import Any

from transformers.utils import import_utils

_flags: Any = import_utils
_flags._datasets_available = False
