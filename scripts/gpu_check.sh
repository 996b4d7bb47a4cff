#!/usr/bin/env bash
# Everything that needs a GPU, in one run: tests, benchmarks with their floors, the memory checker. Prints tables, and
# leaves results under $OUT. Stages may be named: tests copy bench sweep sanitizer (default: all of them).
#
#   bash scripts/gpu_check.sh [stage ...]
#
# Ends within TOTAL_S seconds (560): what does not fit any more is left out and counted as failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-/tmp/gpu_check}
mkdir -p "$OUT"
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH="${PYTHONPATH:-}:$PWD"
stages=" ${*:-copy bench tests sweep sanitizer} "
failed=()

want() { [[ $stages == *" $1 "* ]]; }
# run NAME LIMIT_S COMMAND...: runs it, keeps its output, prints the end of it.
run() {
    local name=$1 limit=$2 started=$SECONDS left=$((${TOTAL_S:-560} - SECONDS))
    shift 2
    if ((left < 15)); then
        echo "=== $name: left out, no time"
        failed+=("$name")
        return
    fi
    ((limit < left)) || limit=$left
    timeout --signal=TERM "$limit" "$@" >"$OUT/now.log" 2>&1
    local code=$?
    { echo "=== $name: exit $code after $((SECONDS - started)) s: $*"; cat "$OUT/now.log"; } >>"$OUT/check.log"
    echo "=== $name: exit $code after $((SECONDS - started)) s"
    tail -n "${LINES_SHOWN:-14}" "$OUT/now.log" | cut -c1-230
    ((code == 0)) || failed+=("$name")
}

: >"$OUT/check.log"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
"$python" - <<'PY'
import cupy, torch, sys, numpy
print("python", sys.version.split()[0], "torch", torch.__version__, "cupy", cupy.__version__, "numpy", numpy.__version__,
      "devices", torch.cuda.device_count())
PY

if want copy; then
    run "copier conformance" 150 "$python" -m pytest tests/transfer/test_copy_cupy.py -q -x -p no:cacheprovider
    LINES_SHOWN=30 run "copier against a device copy" 90 "$python" scripts/bench_copy_gpu.py
fi
if want bench; then
    for name in small direct staged load slices; do
        LINES_SHOWN=24 run "bench gpu-$name" 100 env COLUMNS=200 "$python" -m workers bench "gpu-$name" --json "$OUT/gpu-$name.json"
        "$python" scripts/gpu_table.py "$OUT/gpu-$name.json" || true
    done
fi
if want tests; then
    LINES_SHOWN=40 run "two processes" 200 "$python" -m pytest tests/transfer/test_gpu_two_processes.py -q -p no:cacheprovider --tb=short
    LINES_SHOWN=40 run "pairs of workers" 280 "$python" -m pytest tests/workers/test_gpu_pairs.py -q -p no:cacheprovider --tb=short
    run "pools on a device" 60 "$python" -m pytest tests/unikv/test_buffers.py tests/unikv/test_host_tier.py -q -m gpu -p no:cacheprovider
fi
if want sweep; then
    LINES_SHOWN=64 run "kernel shapes" 120 "$python" scripts/bench_copy_gpu.py --sweep --rounds 7
fi
if want sanitizer; then
    if command -v compute-sanitizer >/dev/null; then
        run "memory checker" 120 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -m pytest \
            tests/transfer/test_copy_cupy.py -q -x -p no:cacheprovider -k "on_the_device and (heads or odd or refuses)"
    else
        echo "=== memory checker: compute-sanitizer is not here"
    fi
fi
echo "=== failed: ${failed[*]:-nothing}"
((${#failed[@]} == 0))
