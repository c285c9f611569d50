"""Records of a job that is compared with one process; see docs/design/verify.md."""

from smp.observe.verification.order import Order as Order
from smp.observe.verification.recording import EndOfVerification as EndOfVerification
from smp.observe.verification.recording import VerificationObserver as VerificationObserver
