"""A reference gateway: remote sandboxes over HTTPS, made by this project's own providers, with a quota, lifetimes and
injected faults. It is a separate program, `osworld-gateway`.

| call | answer |
|---|---|
| POST /v1/sandboxes, `Idempotency-Key` | 201: sandbox_id, session_id, lifetime_s, image_digest, details |
| POST /v1/sandboxes/ID/session | 200: the same fields, with a new session id; the previous one stays valid |
| DELETE /v1/sandboxes/ID | 204; 410 if it is gone |
| GET, POST /v1/sandboxes/ID/guest/PATH, `Idempotency-Key` | the guest's answer, with `X-Answered-By: guest` |
| GET /healthz | counts, without the token |

If a token is set, every other call needs `Authorization: Bearer TOKEN`. A call that names a sandbox also needs
`X-Sandbox-Session`. Over the quota the answer is 429 with Retry-After. A call with an `Idempotency-Key` is executed
once: sent again, it gets the same answer, unless it failed in the gateway. An error of the gateway is
`{"error": ...}`, without `X-Answered-By`.
"""
