#!/usr/bin/env bash
# Installs what the build needs on Debian or Ubuntu, if it is missing: cmake, a C++ compiler and libclang (HiGHS), and,
# when asked for ("setup.sh browser"), Chromium for the test of the report.
set -euo pipefail
need=()
command -v cmake >/dev/null || need+=(cmake)
command -v c++ >/dev/null || need+=(g++)
# Not libclang-cpp.so, which is of LLVM's own tools.
compgen -G '/usr/lib/llvm-*/lib/libclang[-.][0-9s]*' >/dev/null || compgen -G '/usr/lib/*/libclang[-.][0-9s]*' >/dev/null ||
  need+=(libclang-dev)
if [ "${1:-}" = browser ] && ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null; then
  need+=(chromium)
fi
[ ${#need[@]} -eq 0 ] && exit 0
echo "installing: ${need[*]}" >&2
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${need[@]}" >&2
