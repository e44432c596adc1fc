#!/usr/bin/env bash
# Fetches real English text into FOLDER, unless it is there: the reST sources in Debian's package python3.11-doc.
# Usage: documentation.sh FOLDER
set -euo pipefail
folder=$1
[ ! -d "$folder" ] || exit 0
echo "fetching the text (Debian package python3.11-doc)"
rm -rf "$folder.package" && mkdir -p "$folder.package"
(
  cd "$folder.package"
  # Downloaded and unpacked here: nothing is installed, and no root is needed.
  apt-get download -qq python3.11-doc 2>/dev/null || {
    if [ "$(id -u)" -eq 0 ]; then apt-get update -qq; else sudo apt-get update -qq; fi
    apt-get download -qq python3.11-doc
  }
  dpkg-deb -x ./*.deb .
)
mv "$folder.package/usr/share/doc/python3.11/html/_sources" "$folder"
rm -rf "$folder.package"
