#!/usr/bin/env bash
# Make or renew .venv: every package of requirements/cpu.txt, checked against its hashes. Nothing to do, no work.
#   PYTHON=python3.11 requirements/install.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/installed

fail() { printf 'make env: %s\n' "$@" >&2; exit 1; }

usable() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
  for candidate in "${PYTHON:-python3}" python3.12 python3.11 python3.10; do
    if usable "$candidate"; then echo "$candidate"; return; fi
  done
  found=$("${PYTHON:-python3}" --version 2>/dev/null) || found="not there"
  fail "Python 3.10, 3.11 or 3.12 is needed; ${PYTHON:-python3} is $found." \
    "Install one of them and name it: make PYTHON=/path/to/python3.11 ..."
}

wanted=$(cat requirements/cpu.txt requirements/uv.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then exit 0; fi

case "$(uname -sm)" in
  "Linux x86_64" | "Linux aarch64") ;;
  *) fail "the CPU engine runs on Linux; this is $(uname -sm)." ;;
esac
python=$(find_python)
free=$(df -Pm . | awk 'NR == 2 {print $4}')
[ "$free" -ge 9000 ] || [ -e "$venv" ] ||
  fail "9 GB of free disk are needed in $PWD, ${free} MB are there (torch from PyPI brings CUDA's libraries)."

rm -f "$stamp"
if ! usable "$venv/bin/python"; then
  rm -rf "$venv"
  "$python" -m venv "$venv" ||
    fail "'$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv"
fi
network="If the package index cannot be reached: check the network; for a mirror set PIP_INDEX_URL; behind a proxy set HTTPS_PROXY."
echo "make env: installing $(grep -c == requirements/cpu.txt) packages into $venv with $("$venv/bin/python" --version), about 3.8 GB to fetch"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt ||
  fail "the installer could not be installed." "$network"
# uv does not read pip's settings.
export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-https://pypi.org/simple}}"
if [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"; fi
"$venv/bin/uv" pip sync --python "$venv/bin/python" --require-hashes --no-build --compile-bytecode requirements/cpu.txt ||
  fail "packages could not be installed; what was fetched is kept, run it again." "$network"
echo "$wanted" >"$stamp"
echo "make env: done, $(du -sh "$venv" | cut -f1) in $venv"
