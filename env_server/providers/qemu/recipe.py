"""The contents of the base disk of our virtual machines. Pure: everything that determines the disk is here, so a digest
over it names the disk. Our own guest files change more often and are added at the first boot."""

import hashlib
import json

SUITE = "bookworm"
DISK_BYTES = 4 * 1024**3
"""The size that the guest sees; only written blocks use space."""

DESKTOP_PACKAGES = (
    # the window manager and the bus
    "openbox", "dbus", "dbus-x11", "at-spi2-core", "python3-pyatspi",
    # programs that users work with
    "xterm", "mousepad", "pcmanfm", "yad",
    # programs that the guest agent and the tasks call
    "python3", "python3-xlib", "python3-gi", "python3-pil", "python-is-python3", "gir1.2-gtk-3.0", "gir1.2-atspi-2.0",
    "xdotool", "wmctrl", "x11-utils", "x11-xserver-utils", "xclip", "libglib2.0-bin", "gsettings-desktop-schemas",
    "adwaita-icon-theme", "fonts-dejavu-core", "xdg-utils", "procps", "iproute2", "socat", "util-linux",
)  # fmt: skip
"""The Debian packages of a local desktop (the part `debian` of set-up), except its X server and its sandbox."""

MACHINE_PACKAGES = (
    "linux-image-amd64", "initramfs-tools", "busybox-static", "cpio", "fontconfig", "kmod", "sudo",
    "xserver-xorg-core", "xserver-xorg-input-evdev", "x11-xkb-utils",
)  # fmt: skip
"""Further packages that a virtual machine needs."""

KERNEL_MODULES = (
    "arch/x86/crypto", "crypto", "drivers/block/virtio_blk.ko", "drivers/cdrom", "drivers/char/hw_random",
    "drivers/gpu/drm/drm.ko", "drivers/gpu/drm/drm_kms_helper.ko", "drivers/gpu/drm/drm_ttm_helper.ko",
    "drivers/gpu/drm/drm_vram_helper.ko", "drivers/gpu/drm/tiny/bochs.ko", "drivers/gpu/drm/ttm", "drivers/i2c",
    "drivers/input/evdev.ko", "drivers/net/net_failover.ko", "drivers/net/virtio_net.ko", "drivers/virtio", "fs/ext4",
    "fs/fuse", "fs/isofs", "fs/jbd2", "fs/mbcache.ko", "fs/overlayfs", "lib", "net/core",
)  # fmt: skip
"""The kernel drivers that are kept; all others are for hardware that no virtual machine has."""

BOOT_MODULES = (
    "crc32c_generic", "virtio_pci", "virtio_blk", "ext4", "virtio_net", "virtio_rng", "bochs", "virtio_input", "evdev",
)  # fmt: skip

EXCLUDED_PATHS = (
    "/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/help/*",
    "/lib/modules/*/kernel/*", "/usr/lib/udev/hwdb.d/*", "/usr/share/poppler/*",
    # 3D drivers and their compiler: these machines draw their screen with the processor
    "/usr/lib/x86_64-linux-gnu/libLLVM*", "/usr/lib/x86_64-linux-gnu/libz3*", "/usr/lib/x86_64-linux-gnu/dri/*",
)  # fmt: skip

INITRD_SCRIPT = """\
#!/bin/sh
# Process 1 until the disk is there. It loads what these machines have and looks for nothing else, which under emulation
# takes seconds less than a distribution's initial RAM disk.
set -f
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts
mount -t devpts -o nosuid,noexec,gid=5,mode=0620 devpts /dev/pts
mount -t tmpfs -o nosuid,nodev,mode=0755 run /run
while read -r module; do insmod "$module"; done </modules
for word in $(cat /proc/cmdline); do
  case $word in root=*) root=${word#root=} ;; init=*) init=${word#init=} ;; esac
done
tries=0
while [ ! -b "$root" ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
mount -t ext4 "$root" /root || exit 1
for place in dev proc sys run; do mount -o move "/$place" "/root/$place"; done
exec switch_root /root "$init" "$@"
"""

INIT_SCRIPT = """\
#!/bin/sh
# Process 1. The second disk, where there is one, is a tar archive with our own guest files.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if [ -b /dev/vdb ] && [ ! -e /opt/osworld-guest ]; then
  tar --extract --overwrite --file=/dev/vdb --directory=/ && python3 -Im compileall -q /opt/osworld-guest/
fi
exec python3 -Im osworld_guest.vm_init
"""

PREPARE_HOOK = """\
set -e
mkdir -p "$1/etc/initramfs-tools/conf.d"
printf 'MODULES=list\\n' >"$1/etc/initramfs-tools/conf.d/desktop"
printf '/dev/vda / ext4 defaults 0 1\\n' >"$1/etc/fstab"
"""
"""Runs before the kernel is installed. That installation creates an initial RAM disk, which is kept small because it is
not used."""

FINISH_HOOK = f"""\
set -e
chroot "$1" useradd --uid 1000 --user-group --groups sudo --create-home --shell /bin/bash user
printf 'user:password\\n' | chroot "$1" chpasswd
cat >"$1/sbin/desktop-init" <<'END'
{INIT_SCRIPT}END
chmod 755 "$1/sbin/desktop-init"
: >"$1/etc/apt/sources.list"
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/var/cache/apt/archives/*.deb
rm -rf "$1"/var/cache/debconf/*-old "$1"/var/log/*.log
chroot "$1" dpkg-query -W -f '${{Package}} ${{Version}}\\n' >"$OUT/packages"
cat "$1"/boot/vmlinuz-* >"$OUT/vmlinuz"
rm -rf "$1"/boot/*
mkdir -p "$1/boot/ram"
cat >"$1/boot/ram/init" <<'END'
{INITRD_SCRIPT}END
chmod 755 "$1/boot/ram/init"
chroot "$1" sh -ec '
  cd /boot/ram
  mkdir bin dev proc sys run root
  cp /bin/busybox bin/busybox
  for name in sh cat echo insmod mkdir mount sleep switch_root; do ln -s busybox "bin/$name"; done
  for module in {" ".join(BOOT_MODULES)}; do
    modprobe --set-version "$(ls /lib/modules)" --show-depends "$module"
  done | sed -n "s/^insmod \\([^ ]*\\).*/\\1/p" | cat -n | sort -uk2 | sort -n | cut -f2 >modules
  xargs cp --parents --target-directory=. <modules
  find . | cpio --quiet --create --format=newc --owner=0:0 >../initrd.img'
cat "$1/boot/initrd.img" >"$OUT/initrd.img"
rm -rf "$1"/boot/*
# A cache of fonts is valid for folders of the same time, and the disk keeps whole seconds.
find "$1/usr/share/fonts" -type d -exec touch -d @1700000000 {{}} +
chroot "$1" fc-cache --force --system-only
mkdir "$OUT/root"
mount --bind "$1" "$OUT/root"
truncate -s {DISK_BYTES} "$OUT/disk.raw"
mke2fs -q -t ext4 -O ^has_journal -E root_owner=0:0,lazy_itable_init=1 -m 0 -L root -d "$OUT/root" "$OUT/disk.raw"
umount "$OUT/root"
rmdir "$OUT/root"
qemu-img convert -O qcow2 "$OUT/disk.raw" "$OUT/disk.qcow2"
rm "$OUT/disk.raw"
"""
"""Runs in the namespaces of the build, so that files have the right owners; `$OUT` is the folder of the results. The
bind mount shows the root without /proc and the like, which are mounted in it meanwhile."""


def dpkg_options() -> list[str]:
    kept = []
    for name in KERNEL_MODULES:
        kept.append(f"/lib/modules/*/kernel/{name}" + ("" if name.endswith(".ko") else "/*"))
    return [
        "force-unsafe-io",
        *(f"path-exclude={path}" for path in EXCLUDED_PATHS),
        *(f"path-include={path}" for path in kept),
    ]


def recipe_digest() -> str:
    """SHA-256 of everything above that affects the disk; the build records package versions."""
    parts = [SUITE, DISK_BYTES, DESKTOP_PACKAGES, MACHINE_PACKAGES, dpkg_options(), PREPARE_HOOK, FINISH_HOOK]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
