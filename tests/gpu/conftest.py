"""`smp.init` of these tests takes their device; `tests/conftest.py` says CPU to all others."""

from __future__ import annotations

import pytest

from tests.gpu.device import ENV


@pytest.fixture(autouse=True)
def _device_of_smp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
