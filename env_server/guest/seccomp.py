"""A system-call filter for every process of a desktop, including its root: calls that no desktop needs fail with EPERM,
and sockets outside the allowed families with EAFNOSUPPORT. The sandbox does not depend on the filter, which blocks the
kernel interfaces that are exploited most often, and access of other programs to the guest agent's memory and
descriptors."""

import ctypes
import errno
import os
import struct

DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "userfaultfd": (323, 282),
}
"""System call -> its numbers on x86_64 and on aarch64; None if it does not exist there."""

FAMILIES: dict[str, int] = {"UNIX": 1, "INET": 2, "INET6": 10, "NETLINK": 16}
"""Families of sockets that may be created. A vsock would connect to the host's hypervisor."""
MAKES_SOCKETS: dict[str, tuple[int, int]] = {"socket": (41, 198), "socketpair": (53, 199)}
"""Calls whose first argument is a family; numbers as above."""
CHANGES_LIMITS: tuple[int, int] = (302, 261)
"""prlimit64, whose first argument is a process. Only 0, the caller, is allowed: the guest agent has the user's uid, and
with a lowered limit of descriptors it could not answer."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its column above, and its audit architecture (AUDIT_ARCH_*)."""
_X32_BIT = 0x40000000
"""On x86_64, numbers from this bit on are the x32 variants of the same calls."""
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_NOT_BELOW, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _FAIL, _NO_FAMILY = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.EAFNOSUPPORT
_INSTRUCTION = struct.Struct("=HBBI")


def build_filter(machine: str) -> bytes | None:
    """The filter as a BPF program; None for a machine whose numbers are not listed here."""
    if machine not in _MACHINES:
        return None
    column, audit_number = _MACHINES[machine]
    program = [
        (_LOAD_WORD, 0, 0, _MACHINE_AT),
        (_JUMP_IF_EQUAL, 1, 0, audit_number),
        (_RETURN, 0, 0, _FAIL),  # calls of another architecture, such as 32-bit ones, have other numbers
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [(_JUMP_IF_NOT_BELOW, 0, 1, _X32_BIT), (_RETURN, 0, 0, _FAIL)]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            program += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL)]
    by_family = [(_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_AT)]  # an int: the kernel reads only its low half
    for family in FAMILIES.values():
        by_family += [(_JUMP_IF_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    by_family.append((_RETURN, 0, 0, _NO_FAMILY))
    for numbers in MAKES_SOCKETS.values():
        program += [(_JUMP_IF_EQUAL, 0, len(by_family), numbers[column]), *by_family]
    own_limits = [(_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_AT), (_JUMP_IF_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW)]
    own_limits.append((_RETURN, 0, 0, _FAIL))
    program += [(_JUMP_IF_EQUAL, 0, len(own_limits), CHANGES_LIMITS[column]), *own_limits]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def install_filter() -> bool:
    """Permanent, for this process and all its children. False on an unknown machine. Needs no_new_privs, or root of the
    user namespace. OSError if the kernel refuses."""
    program = build_filter(os.uname().machine)
    if program is None:
        return False
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a count of instructions, and a pointer to them
    header = struct.pack("=H6xQ", len(program) // _INSTRUCTION.size, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses a seccomp filter")
    return True
