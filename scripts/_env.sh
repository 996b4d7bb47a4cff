# Shared by demo.sh and test.sh: makes the project's own virtual environment, or finds that it is already right.
# Source it and call `prepare_environment`; afterwards "$VENV/bin" has everything.
#
#   .venv/           belongs to these scripts: rebuilt from nothing whenever its stamp does not match
#   .venv/.stamp     says what it was built from; written last, so an interrupted build never looks finished
#   .venv/pip.log    everything pip said
#
# PYTHON=/path/to/python chooses the interpreter.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
STAMP="$VENV/.stamp"
LOG="$VENV/pip.log"
CONSTRAINTS="$ROOT/constraints/cpu.txt"

# Models come from the package index (scripts/fetch_model.py); nothing else may be fetched behind anyone's back.
export HF_HUB_OFFLINE=1

say() { printf '== %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# A usable interpreter: 3.11 or newer, able to make an environment with pip in it.
is_usable_python() {
  "$1" -c 'import sys; import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local name seen=""
  local -a names=(python3 python3.14 python3.13 python3.12 python3.11 python)
  if [[ -n "${PYTHON:-}" ]]; then names=("$PYTHON"); fi
  for name in "${names[@]}"; do
    if is_usable_python "$name"; then
      # The interpreter behind an active environment, never that environment: it may be the one we are about to rebuild.
      "$name" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'
      return
    fi
    seen+="${seen:+; }$name: $("$name" --version 2>&1 | head -n 1 || true)"
  done
  die "no Python 3.11 or newer with the venv and ensurepip modules (found: $seen);" \
    "install one (Debian and Ubuntu: also its python3-venv package), or name one with PYTHON=/path/to/python"
}

has_gpu() { [[ -e /dev/nvidia0 ]] && command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; }

# CUDA 13 needs driver 580 or newer; older drivers get the CUDA 12 build of CuPy.
cuda_extra() {
  local driver
  driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
  [[ "$driver" =~ ^[0-9]+ ]] || die "nvidia-smi gives driver version '$driver', expected a number; check the driver"
  if ((${driver%%.*} >= 580)); then echo cuda13; else echo cuda12; fi
}

# What the environment is made of, as text. Editable installs and scripts carry the clone's path: a moved clone is stale.
describe_environment() {
  printf 'python %s\n' "$("$1" -VV 2>&1)" "$1"
  printf 'extras %s\nroot %s\n' "$2" "$ROOT"
  sha256sum "$ROOT/pyproject.toml" "$CONSTRAINTS" | cut -d ' ' -f 1
}

is_current() {
  [[ -f "$STAMP" && "$(<"$STAMP")" == "$1" ]] && "$VENV/bin/python" -c '' 2>/dev/null
}

install_everything() {
  local python="$1" extras="$2"
  shift 2
  rm -f "$STAMP"
  "$python" -m venv --clear "$VENV"
  if ! "$VENV/bin/python" -m pip --disable-pip-version-check install --progress-bar off "$@" -e "$ROOT[$extras]" &>"$LOG"
  then
    tail -n 20 "$LOG" >&2
    die "pip could not install unikv[$extras]; all it said is in $LOG"
  fi
}

prepare_environment() {
  local python extras=dev,hf want
  local -a limits=(--constraint "$CONSTRAINTS")
  python="$(find_python)"
  if has_gpu; then
    extras+=",$(cuda_extra)" || exit 1
    limits=()
  fi
  want="$(describe_environment "$python" "$extras")"
  if is_current "$want"; then
    say "environment: .venv is up to date"
    return
  fi
  if [[ -f "$STAMP" ]]; then
    say "environment: .venv was built from other requirements; building it anew"
  elif [[ -d "$VENV" ]]; then
    say "environment: .venv is unfinished; building it anew"
  fi
  if ((${#limits[@]})); then
    say "environment: installing unikv[$extras], no GPU found, versions from constraints/cpu.txt (takes minutes)"
  else
    say "environment: installing unikv[$extras], GPU found, newest versions (takes minutes)"
  fi
  install_everything "$python" "$extras" "${limits[@]}"
  printf '%s\n' "$want" >"$STAMP"
  say "environment: ready"
}
