"""The key by which a backend knows a side effect again that it has carried out already."""

from __future__ import annotations

import hashlib


def idempotency_key(session_token: str, client_turn_id: str) -> str:
    """Return the key that every side-effecting call of this turn carries.

    `session_token` is what the client holds for its session, `client_turn_id` what the client
    made up for the turn, the same in each retry. A turn whose process or region died after a tool
    had run is sent again, to another process that knows nothing of it; the same two words give the
    same key there, in any language, and the backend that has seen it answers what it answered
    then. A turn that calls one tool twice on purpose adds its own count behind the key. Raises
    ValueError for an empty word: all who have none would share one key.

    Article 003, "Turns in flight".

    >>> idempotency_key("eu1.s-1", "t-1")
    'ik1-755af7c79d5cf8227cd5a573f557040c'
    """
    if not (session_token and client_turn_id):
        raise ValueError("an idempotency key needs a session token and the client's turn id")
    digest = hashlib.sha256()
    for word in (session_token, client_turn_id):
        # The length first: else ("a", "bc") and ("ab", "c") would be one turn.
        spelled = word.encode("utf-8", "surrogatepass")
        digest.update(len(spelled).to_bytes(4, "big") + spelled)
    return f"ik1-{digest.hexdigest()[:32]}"
