#!/usr/bin/env bash
# Moves the KV cache of a real small model between two processes and shows that not a token changes.
#
#   bash scripts/demo.sh                        the first run installs everything and fetches the model
#   bash scripts/demo.sh --json results.json    arguments go to `unikv bench smollm2`
#
# The exit code is that of the benchmark: 0 fine, 1 the work failed, 2 the two sides refused each other, 64 bad usage.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

(cd "$ROOT" && prepare_environment)
say "model: SmolLM2-135M (fetched and converted once, about 90 MB)"
"$VENV/bin/python" "$ROOT/scripts/fetch_model.py" || die "the model could not be fetched"
say "unikv bench smollm2${*:+ $*} (a few minutes on two cores)"
code=0
"$VENV/bin/unikv" bench smollm2 "$@" || code=$?
case $code in
  0) say "demo: fine" ;;
  2) say "demo: the two sides refused each other (exit code 2); see above" ;;
  *) say "demo: FAILED (exit code $code); see above" ;;
esac
exit "$code"
