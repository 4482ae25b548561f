"""A reference gateway: remote sandboxes over HTTPS, made by this project's own providers, with a quota, lifetimes and
injected faults. It is a separate program, `osworld-gateway`.

| call | answer |
|---|---|
| POST /v1/sandboxes, `Idempotency-Key` | 201: sandbox_id, session_id, lifetime_s, image_digest, details |
| POST /v1/sandboxes/ID/session | the same, with a new session id; the previous one stays valid |
| DELETE /v1/sandboxes/ID | 204; 410 if it is gone |
| GET, POST /v1/sandboxes/ID/guest/PATH, `Idempotency-Key` | the guest's answer, with `X-Answered-By: guest` |
| GET /healthz | counts, without the token |

Every other call needs `Authorization: Bearer TOKEN`, and a call that names a sandbox needs `X-Sandbox-Session` too.
Over the quota the answer is 429 with Retry-After. A call with an `Idempotency-Key` is executed once: sent again, it
gets the same answer. An answer that is not the guest's is `{"error": ...}`.
"""
