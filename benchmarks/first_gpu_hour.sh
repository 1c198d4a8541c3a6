#!/usr/bin/env bash
# What to run in the first hour on one GPU: each step is one command of at most 10 minutes that prints its first figure
# within two. A step that fails or runs out of time is written down with the figures that it printed, and the next one
# runs. Results: FOLDER/first_gpu_hour.json, a table, and a log of each step.
#
# usage: benchmarks/first_gpu_hour.sh [--dry] [--limit SECONDS] [--output FOLDER] [STEP...]
#   --dry     tiny sizes, also without a GPU: shows that every command starts and what it prints
#   --limit   of a step (600)
#   STEP...   only these; --list prints their names
# Exit code: 0 all steps ran, 1 some did not, 2 a wrong call, or no GPU without --dry.
set -u
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1  # a step that runs out of time keeps what it has printed
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"  # benchmarks use what tests/support has
PYTHON=${PYTHON:-.venv/bin/python}
dry=false limit=600 output=work/first_gpu_hour chosen=()
STEPS=(
  device parity calibrate forecast step_124m graphs_124m float8_124m step_350m float8_350m offload lengths generation moe
  hybrid step_1.5b
)
while [ $# -gt 0 ]; do
  case "$1" in
    --dry) dry=true ;;
    --limit) limit=${2:?--limit SECONDS}; shift ;;
    --output) output=${2:?--output FOLDER}; shift ;;
    --list) printf '%s\n' "${STEPS[@]}"; exit 0 ;;
    --*) echo "first_gpu_hour: unknown option $1; see the head of $0" >&2; exit 2 ;;
    *) chosen+=("$1") ;;
  esac
  shift
done
[ ${#chosen[@]} -gt 0 ] || chosen=("${STEPS[@]}")
for name in "${chosen[@]}"; do
  printf '%s\n' "${STEPS[@]}" | grep -qxF -- "$name" || { echo "first_gpu_hour: no step $name; one of ${STEPS[*]}" >&2; exit 2; }
done
if ! $dry && ! $PYTHON -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "first_gpu_hour: torch sees no GPU (gristmill doctor says why); --dry runs tiny sizes without one" >&2
  exit 2
fi

# command_of STEP: what the step runs, at full or tiny size.
command_of() {
  local python="$PYTHON benchmarks"
  if $dry; then
    case "$1" in
      device) echo "$PYTHON -m gristmill.pipelines.cli.main doctor" ;;
      calibrate) echo "$PYTHON -m gristmill.pipelines.cli.main calibrate --help" ;;  # minutes on a CPU
      parity) echo "$PYTHON -m pytest -q -n 0 tests/training/test_on_a_gpu.py" ;;  # skipped without a GPU
      step_124m) echo "$python/train_step.py --quick --sizes 10M --vocabularies small --precisions bf16" ;;
      graphs_124m | step_* | float8_*) echo "$python/train_step.py --help" ;;
      moe) echo "$python/moe.py --quick" ;;
      hybrid) echo "$python/mixers.py --quick --parts decoding" ;;
      lengths | offload) echo "$python/memory.py --quick --parts $1" ;;
      generation) echo "$python/generate.py --quick --longest 16" ;;
      forecast) echo "$python/planner.py --quick --gpu" ;;
    esac
    return
  fi
  # The sizes are those whose first figure is there within two minutes; each program without them takes longer.
  local step="$python/train_step.py --vocabularies large --sequences 1024 --only-compiled --quick"
  local memory="$python/memory.py --short --profile $output/hardware.yaml"
  case "$1" in
    device) echo "$PYTHON -m gristmill.pipelines.cli.main doctor" ;;
    calibrate) echo "$PYTHON -m gristmill.pipelines.cli.main calibrate $output/hardware.yaml" ;;
    forecast) echo "$python/planner.py --gpu --profile $output/hardware.yaml" ;;
    parity) echo "$PYTHON -m pytest -q -n 8 tests/training/test_on_a_gpu.py" ;;
    step_124m) echo "$step --precisions bf16 --sizes 124M --samples 16" ;;
    graphs_124m) echo "$step --precisions bf16 --sizes 124M --samples 16 --cuda-graphs" ;;
    float8_124m) echo "$step --precisions float8 --sizes 124M --samples 16" ;;
    step_350m) echo "$step --precisions bf16 --sizes 350M --samples 8" ;;
    float8_350m) echo "$step --precisions float8 --sizes 350M --samples 8" ;;
    step_1.5b) echo "$step --precisions bf16 --sizes 1.5B --samples 2" ;;
    offload | lengths) echo "$memory --parts $1" ;;
    generation) echo "$python/generate.py --longest 128 --rounds 1" ;;
    moe) echo "$python/moe.py --quick" ;;
    hybrid) echo "$python/mixers.py --quick --parts gpu" ;;
  esac
}

mkdir -p "$output"
: > "$output/steps.tsv"
failed=0
for name in "${chosen[@]}"; do
  command=$(command_of "$name")
  echo "== $name: $command"
  begun=$(date +%s)
  timeout "$limit" bash -c "$command" > "$output/$name.log" 2>&1
  code=$?
  printf '%s\t%s\t%s\t%s\n' "$name" "$code" $(($(date +%s) - begun)) "$command" >> "$output/steps.tsv"
  [ $code -eq 0 ] || { failed=1; echo "   FAILED with $code: $(tail -1 "$output/$name.log")"; }
done

# One JSON of all steps and the figures that they printed, and a table.
$PYTHON - "$output" <<'END'
import json
import sys
from pathlib import Path

folder, steps = Path(sys.argv[1]), []
for line in (folder / "steps.tsv").read_text().splitlines():
    name, code, seconds, command = line.split("\t")
    log, figures = (folder / f"{name}.log").read_text(errors="replace").splitlines(), []
    for printed in log:
        if printed.startswith('{"figure"'):
            figures.append(json.loads(printed))
    state = {"0": "ran", "124": "out of time"}.get(code, f"failed with {code}")
    error = None if code == "0" else next((text for text in reversed(log) if text.strip()), "")
    steps.append({"step": name, "state": state, "seconds": int(seconds), "command": command, "error": error, "figures": figures})
(folder / "first_gpu_hour.json").write_text(json.dumps(steps, indent=1) + "\n")
print(f"\n{'step':12} {'state':16} {'s':>5}  figures")
for step in steps:
    print(f"{step['step']:12} {step['state']:16} {step['seconds']:5}  {len(step['figures'])}")
    for figure in step["figures"]:
        ours, peer = figure.get("ours"), figure.get("peer")
        print(f"    {figure['figure']:44} {ours!s:>12} {peer!s:>12} {figure.get('unit', '')}")
print(f"written to {folder / 'first_gpu_hour.json'}")
END
exit $failed
