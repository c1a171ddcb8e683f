#!/usr/bin/env bash
# Pack what a GPU host without a package registry needs to run this benchmark: build/bench/*.tar.xz.
#
#   prepare.sh [site|trees ..]      both unless named; run from anywhere, `make branch` first
#
#   site.tar.xz                     Python packages (site.txt), 38 MB
#   ours.tar.xz base.tar.xz         our branch and its base, from build/sglang
#   peer.tar.xz                     SGLang 0.5.11 as released; PEER=path of its wheel saves the download
#
# The host: x86-64 Linux, Python 3.12, torch 2.11 for CUDA 13, Triton 3.6, nvcc, a Hopper GPU.
# unpack.sh is what is run there.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=build/bench
peer=sglang-0.5.11-cp311-cp311-manylinux_2_34_x86_64.whl
peer_sha256=fe0748beaff218d3e16c9018a5e19f018db06fc3c7ac4f90d2f93da1cf074b6f
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

pack() { # pack FOLDER NAME: several blocks, so that they can be unpacked on several cores
  tar -C "$1" --sort=name --owner=0 --group=0 --mtime=@0 \
    --exclude=multimodal_gen --exclude='*.pyc' --exclude='grpc/_core.*.so' -cf - . |
    xz -T0 -6 >"$work/$2.xz"
  mv "$work/$2.xz" "$out/$2.tar.xz"
  ls -l "$out/$2.tar.xz"
}

trees() {
  local branch=build/sglang
  [ -d "$branch/.git" ] || { echo "error: no $branch: run \`make branch\` first" >&2; exit 1; }
  [ -z "$(git status --porcelain -- python)" ] ||
    echo "warning: python/ has changes that are not committed; the figures will name the commit" >&2
  local name revision
  for name in ours:routed-experts base:base; do
    revision=${name#*:} name=${name%:*}
    mkdir -p "$work/$name"
    git -C "$branch" archive "$revision" python | tar -C "$work/$name" -xf -
    echo "$(git rev-parse HEAD) $(git -C "$branch" rev-parse "$revision:python")" >"$work/$name/COMMIT"
    pack "$work/$name" "$name"
  done
  if [ -z "${PEER:-}" ]; then
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 \
      --platform manylinux_2_34_x86_64 --dest "$work" sglang==0.5.11
    PEER=$work/$peer
  fi
  echo "$peer_sha256  $PEER" | sha256sum --quiet --check
  mkdir -p "$work/peer"
  "$python" -m zipfile -e "$PEER" "$work/peer/python"
  pack "$work/peer" peer
}

site() {
  local platforms=() n
  for n in $(seq 39 -1 5); do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
  for n in 2014 2010 1; do platforms+=(--platform "manylinux${n}_x86_64"); done
  "$python" -m pip install --quiet --no-deps --no-compile --require-hashes --only-binary=:all: \
    --ignore-requires-python \
    --implementation cp --python-version 3.12 --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
    --target "$work/site" --requirement benchmark/routed_experts/site.txt
  # Kernels of attention back ends and of GPUs that are not used here: most of the gigabyte.
  (cd "$work/site" && rm -rf bin lib deep_gemm _mscclpp* torch_memory_saver_hook_mode_torch_cu12* \
    sgl_kernel/{flash_ops,flashmla_ops,infllm_ops}* sgl_kernel/sm100)
  pack "$work/site" site
}

for what in "${@:-trees site}"; do
  for each in $what; do "$each"; done
done
