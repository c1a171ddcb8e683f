#!/usr/bin/env bash
# On the GPU host: unpack what prepare.sh has packed, once.
#
#   unpack.sh [ARCHIVES] [TARGET]     build/bench and build/bench-host unless named
#
# Gives TARGET/site and TARGET/trees/{ours,base,peer}, compiled to bytecode, so that the servers do
# not each do it while they start.
set -euo pipefail
archives=$(realpath "${1:-build/bench}")
target=${2:-build/bench-host}
mkdir -p "$target/trees"
cd "$target"
jobs=()
for archive in "$archives"/*.tar.xz; do
  name=$(basename "$archive" .tar.xz)
  [ "$name" = site ] && folder=site || folder=trees/$name
  stamp=.$name-$(sha256sum "$archive" | head -c 16)
  [ -e "$stamp" ] && continue
  (
    rm -rf "$folder" && mkdir -p "$folder"
    xz -dc -T0 "$archive" | tar -C "$folder" -xf -
    python3 -m compileall -q -j 0 "$folder" >/dev/null 2>&1 || true # some packages hold templates
    touch "$stamp"
  ) &
  jobs+=($!)
done
for job in ${jobs[@]+"${jobs[@]}"}; do wait "$job"; done
