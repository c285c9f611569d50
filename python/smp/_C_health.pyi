"""Types of the health room in the C++ core; part of `_C.pyi`, there is no such module."""

from smp._C import FaultBoard

class StopAgreement:
    def __init__(self, board: FaultBoard) -> None: ...
    def arrive(self, timeout_s: float) -> bool: ...
    def decide(self, boundary: int) -> None: ...
    def freeze(self) -> int: ...
    @property
    def is_asked(self) -> bool: ...

MIN_SECRET_BYTES: int

class Handshake:
    @staticmethod
    def listener(secret: bytes, purpose: str) -> Handshake: ...
    @staticmethod
    def caller(secret: bytes, purpose: str, number: int) -> Handshake: ...
    def advance(self, received: bytes) -> tuple[int, bytes]: ...
    @property
    def is_proven(self) -> bool: ...
    @property
    def caller_number(self) -> int: ...

class LivenessHub:
    def __init__(
        self,
        world_size: int,
        *,
        address: str,
        secret: bytes,
        deadlock_after_s: float = 5.0,
        hang_after_s: float = 0.0,
        hang_raises: bool = False,
    ) -> None: ...
    def close(self, linger_s: float = 0.0) -> None: ...
    @property
    def port(self) -> int: ...

class LivenessClient:
    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes,
        global_rank: int,
        board: FaultBoard,
        connect_timeout_s: float = 60.0,
        stops: StopAgreement | None = None,
        stacks_signals: tuple[int, int, int] | None = None,
        stacks_fd: int = -1,
        hang_after_s: float = 0.0,
        hang_raises: bool = False,
        interrupt_signal: int = -1,
        device: str = "cpu",
    ) -> None: ...
    def close(self) -> None: ...
    def leave(self) -> None: ...
    def request_stop(self) -> None: ...
    def report_raised(self, where: str, text: str) -> None: ...
