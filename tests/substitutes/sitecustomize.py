"""Gives each Python that has this folder on its path the lanes that SMP_TEST_LANES asks for."""

import os

if "SMP_TEST_LANES" in os.environ:
    import smp._C  # noqa: F401 - smp_testing uses its symbols
    import smp_testing  # noqa: F401
