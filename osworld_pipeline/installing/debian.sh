#!/usr/bin/env bash
# Names the Debian packages of the given parts that this machine lacks, then installs them; if the user may not, prints
# the command for an administrator. Run by `osworld-pipeline setup`, and sourced by scripts/setup in a checkout.
#   debian.sh [--dry-run] debian|extras|qemu|wine...
set -euo pipefail
lists=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }
fail() { printf '\033[1;31m[setup]\033[0m %s\n' "$*" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

may_be_root() {
  [ "$(id -u)" -eq 0 ] || { command -v sudo >/dev/null && sudo true; }
}

missing_packages() { # missing_packages LIST...
  local installed
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' 2>/dev/null | awk '$2 == "installed" {print $1}')
  grep -hvE '^\s*(#|$)' "$@" | while read -r package; do
    grep -qxF "$package" <<<"$installed" || printf '%s ' "$package"
  done
}

# Another apt-get (automatic updates) may lock the lists for a while, and apt-get update does not wait for the lock.
update_lists() {
  local waited=0 complaint
  until complaint=$(as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq 2>&1 >/dev/null); do
    if [[ $complaint != *"get lock"* ]] || [ "$waited" -ge 300 ]; then
      fail "apt-get update failed: is there a network? It said: ${complaint:-nothing}"
    fi
    [ "$waited" -gt 0 ] || say "another program uses apt; waiting for it"
    sleep 3; waited=$((waited + 3))
  done
}

command_for() { printf 'apt-get update && apt-get install -y --no-install-recommends %s\n' "$*"; }

install_packages() { # install_packages PACKAGE...
  say "Debian packages to install: $*"
  may_be_root || fail "Debian packages are missing, and this user may not install them: as root, run: $(command_for "$@")"
  update_lists
  local quietly=()
  # A person sees apt's own progress.
  if [ -t 2 ]; then exec 3>&2; else quietly=(-qq); exec 3>/dev/null; fi
  as_root env DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes apt-get -o DPkg::Lock::Timeout=300 \
    install -y "${quietly[@]}" --no-install-recommends "$@" >&3 ||
    fail "apt-get could not install: $*"
}

files_of() { # files_of PART...
  local part
  for part in "$@"; do
    [ -f "$lists/debian-packages-$part.txt" ] || fail "there is no list of Debian packages '$part'"
    printf '%s\n' "$lists/debian-packages-$part.txt"
  done
}

setup_debian() { # setup_debian [--dry-run] PART...
  local files missing action=install_packages
  if [ "$1" = --dry-run ]; then action=command_for; shift; fi
  command -v dpkg-query >/dev/null || fail "the desktops need Debian or Ubuntu (no dpkg here)"
  mapfile -t files < <(files_of "$@")
  [ ${#files[@]} -eq $# ] || exit 1
  missing=$(missing_packages "${files[@]}")
  # shellcheck disable=SC2086
  [ -z "$missing" ] || "$action" $missing
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then setup_debian "$@"; fi
