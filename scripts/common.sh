# Shared by the scripts in this folder (sourced, not run): where things are kept, and how a step is announced and timed.
# shellcheck shell=bash disable=SC2034  # the sourcing scripts use the variables
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Downloads, the built llama.cpp, models, texts and rotation files: everything that outlives a checkout.
OSCAR_CACHE=${OSCAR_CACHE:-${XDG_CACHE_HOME:-${HOME:?set HOME or OSCAR_CACHE}/.cache}/oscar}
# Processes at once.
OSCAR_JOBS=${OSCAR_JOBS:-$(nproc)}

# llama.cpp comes from this release's source archive on the Python package index: it carries the whole tree, and its
# content is pinned here, so that everyone measures the same engine.
llama_release=0.3.36
llama_archive=llama_cpp_python-$llama_release.tar.gz
llama_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# step TITLE COMMAND...: says what runs, runs it, says how long it took. A failing command ends the script.
step() {
  local title=$1 start=$SECONDS
  shift
  printf '==> %s\n' "$title"
  "$@"
  printf '    %s: %d s\n' "$title" $((SECONDS - start))
}

# llama.cpp is compiled for this machine's own CPU, so the folder's name holds what the result depends on: another CPU,
# compiler or release gets another folder and never runs instructions it lacks.
llama_prefix() {
  local key
  key=$({
    grep -m1 -E '^(flags|Features)' /proc/cpuinfo | cut -d: -f2 | tr ' ' '\n' | sort
    "${CXX:-c++}" --version 2>/dev/null | head -n 1
    echo "$llama_sha256"
  } | sha256sum | cut -c1-12)
  printf '%s/llama-%s-%s\n' "$OSCAR_CACHE" "$llama_release" "$key"
}
