"""Checks whether Hugging Face is within reach, since its client retries for half a minute."""

from __future__ import annotations

import importlib
import threading

_PATIENCE_S = 1.5


def why_unreachable(patience_s: float = _PATIENCE_S) -> str | None:
    """Returns a reason in words if the server of models does not answer, or None.

    The request uses the session of `huggingface_hub`, so its proxies and its offline switch count.
    It runs in a thread, because looking up a name obeys no timeout.

    Args:
        patience_s: seconds in which the answer has to come.
    """
    hub = importlib.import_module("huggingface_hub")
    endpoint: str = importlib.import_module("huggingface_hub.constants").ENDPOINT
    found: list[str | None] = []

    def ask() -> None:
        try:
            hub.utils.get_session().head(endpoint, timeout=patience_s)
            found.append(None)
        except Exception as error:  # the session may raise any exception
            text = str(error).strip().splitlines()
            found.append(text[0] if text else type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience_s)
    reason = found[0] if found else f"no answer within {patience_s:g} s"
    return None if reason is None else f"{endpoint} cannot be reached ({reason})"
