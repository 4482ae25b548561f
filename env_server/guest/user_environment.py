"""The environment of the desktop's user, the same in a sandbox and in a virtual machine."""

USER_ID = 1000
HOME = "/home/user"
RUNTIME = f"/run/user/{USER_ID}"
USER_ENVIRONMENT = {
    "HOME": HOME,
    "USER": "user",
    "LOGNAME": "user",
    "SHELL": "/bin/bash",
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games",
    "LANG": "C.UTF-8",
    "DISPLAY": ":0",
    "XDG_RUNTIME_DIR": RUNTIME,
    "DBUS_SESSION_BUS_ADDRESS": f"unix:path={RUNTIME}/bus",
    "XDG_SESSION_TYPE": "x11",
    "XDG_CURRENT_DESKTOP": "X-Generic",
    "TERM": "xterm-256color",
}
