"""A reference gateway: remote sandboxes over HTTPS, made by this project's own providers, with a quota, lifetimes and
faults on request. It is a program of its own, `osworld-gateway`.

| call | answer |
|---|---|
| POST /v1/sandboxes, `Idempotency-Key` | 201: sandbox_id, session_id, lifetime_s, image_digest, details |
| POST /v1/sandboxes/ID/session | the same; the session's id is another, and the one it was asked with stays good |
| DELETE /v1/sandboxes/ID | 204; 410 where it is gone |
| GET, POST /v1/sandboxes/ID/guest/PATH, `Idempotency-Key` | the guest's, with `X-Answered-By: guest` |
| GET /healthz | counts, without the token |

Everything else needs `Authorization: Bearer TOKEN`, and what names a sandbox needs `X-Sandbox-Session` too. Over the
quota the answer is 429 with Retry-After. A call with an `Idempotency-Key` happens once: sent again, it gets the same
answer. What is not the guest's answer is `{"error": ...}`.
"""
