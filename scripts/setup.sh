#!/usr/bin/env bash
# Installs what the build and the tests need, from Debian's packages. Safe to run again: it does nothing when all is
# there. Needs root or sudo only when something is missing. `setup.sh --stamp FILE` leaves FILE when it is done.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache make
  libdnnl-dev libfmt-dev libspdlog-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libxxhash-dev
  libpcre2-dev libutf8proc-dev zlib1g-dev libzstd-dev pkg-config
  libgtest-dev libbenchmark-dev
  ca-certificates
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done

if ((${#missing[@]})); then
  run=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "setup: needs root or sudo to install: ${missing[*]}" >&2; exit 1; }
    run=(sudo)
  fi
  command -v apt-get >/dev/null || { echo "setup: this is no Debian; install the equivalents of: ${missing[*]}" >&2; exit 1; }
  echo "setup: installing ${missing[*]}"
  "${run[@]}" apt-get update -qq
  # A parallel package manager run (unattended upgrades) is waited for.
  "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq \
    --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ "${1:-}" = --stamp ]; then
  mkdir -p "$(dirname "$2")"
  touch "$2"
fi
