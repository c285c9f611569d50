"""Compares a run with one process: its first step, or all that `smp verify` has ordered.

See docs/design/verify.md.
"""

from smp.observe.verification.first_step import FirstStepDifference as FirstStepDifference
from smp.observe.verification.order import Order as Order
from smp.observe.verification.recording import EndOfVerification as EndOfVerification
