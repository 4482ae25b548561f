"""Desktops in virtual machines: our own Debian image, or any disk image with OSWorld's guest server. A machine is
booted once and its memory saved; every desktop maps that memory copy-on-write and has a disk overlay."""

PASSWORD_VARIABLE = "WINDOWS_ADMIN_PASSWORD"  # noqa: S105 - the variable's name, not a password
