import os
import pathlib
import time

from desktop_env.controllers.setup import UPLOADED


def exact_match(result, rules):
    return result == rules["expected"]


def crash(result, rules):
    raise KeyError("nothing there")


def hang(result, rules):
    time.sleep(60)


def die(result, rules):
    os._exit(3)


def too_much(result, rules):
    return 7


def is_uploaded(result, rules):
    return rules["expected"] in UPLOADED


def infeasible():
    pass


def spin(result, rules):
    while True:
        pass


def take_memory(result, rules):
    return len(bytearray(rules["expected"])) and 1


def take_memory_in_children(result, rules):
    """Each child takes less memory than one process may take."""
    for _ in range(4):
        if os.fork() == 0:
            block = bytearray(os.urandom(1)) * rules["expected"]
            time.sleep(20)
            os._exit(len(block) == 0)
    time.sleep(20)
    return 1


def fork(result, rules):
    """Scores 1 if it can start fewer processes than expected, but more than half as many."""
    children = []
    try:
        while len(children) < 4 * rules["expected"]:
            children.append(os.fork())
            if children[-1] == 0:
                time.sleep(20)
                os._exit(0)
    except BlockingIOError:
        pass
    for child in children:
        os.kill(child, 9)
    return float(rules["expected"] // 2 < len(children) < rules["expected"])


def share_memory(result, rules):
    """Processes that share as many bytes as are expected, longer than one look at their memory. Then one after the
    other ends and another takes its place, so that some end during a look."""
    held = b"x" * rules["expected"]
    children = [_fork_sleeper() for _ in range(8)]
    time.sleep(0.6)
    for _ in range(60):
        children.append(_fork_sleeper())
        time.sleep(0.02)
        _kill(children.pop(0))
    for child in children:
        _kill(child)
    return float(len(held) == rules["expected"])


def _fork_sleeper():
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    return child


def _kill(child):
    os.kill(child, 9)
    os.waitpid(child, 0)


def sees(result, rules):
    return float(os.path.exists(rules["expected"]))


def num_processes(result, rules):
    return float(sum(name.isdigit() for name in os.listdir("/proc")) == rules["expected"])


def leave(result, rules):
    """Leaves files in every folder where it can; `expected` lists the folders where it must not be able to."""
    for folder in (*rules["expected"], "/tmp", "/dev/shm"):
        try:
            pathlib.Path(folder, "left").touch()
        except OSError:
            continue
        if folder in rules["expected"]:
            return 0
    return 1
