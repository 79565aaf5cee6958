#!/usr/bin/env bash
# Check this checkout on a CUDA GPU: gpu_checks.sh DIRECTORY [CHECK...]
#
# Runs the checks, or those that are named, and writes DIRECTORY/CHECK.log for each. The last lines of
# the output are one line a check: exit code, seconds, what it found. PYTHON names the interpreter,
# which needs the packages of the extras `train` and `test`. BUDGET bounds the whole in seconds (230).
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: gpu_checks.sh DIRECTORY [CHECK...]}
shift
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
shape=qwen2.5-0.5b

# run CHECK SECONDS COMMAND...: with a time limit, into CHECK.log
run() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    local left=$((${BUDGET:-230} - SECONDS))
    limit=$((limit < left ? limit : left))
    if [ "$limit" -lt 5 ]; then
        echo "$name exit=skipped, no time left" | tee -a "$out/summary.txt"
        return
    fi
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "$name exit=$code seconds=$((SECONDS - began)) $(found "$name")" |
        tee -a "$out/summary.txt"
}

# The main line of a log.
found() {
    grep -aE '[0-9]+ (passed|failed|error)|^\| (long|the same|qwen|embedded)|^ok |held-out|Error' \
        "$out/$1.log" | tail -n 1 | cut -c 1-300
}

versions() {
    run versions 60 "$python" -c "
import sys, torch, transformers, accelerate, peft
print(sys.version.split()[0], 'torch', torch.__version__, 'transformers', transformers.__version__)
print('accelerate', accelerate.__version__, 'peft', peft.__version__)
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())"
    sed 's/^/    /' "$out/versions.log"
}

# Tests that need a GPU.
tests() {
    run tests 110 "$python" -m pytest -p no:cacheprovider -q -m gpu --tb=short -rfs --show-capture=no \
        -n "${WORKERS:-4}" --dist load $(grep -rl 'mark\.gpu' tests/unit)
}

# Three processes a node, two nodes on one GPU: reward rises, weights are averaged.
demo() {
    run demo 100 "$python" -m swarmnode demo --tiny --nodes 2 --minutes 0.4 --http-port 0
}

# Memory of an update against `swarmnode plan`, and the speed of sampling.
card() {
    run card 90 "$python" -m benchmarks.card --parts sampling update --shape "$shape" \
        --json "$out/card.json"
}

# A step against TRL's GRPOTrainer.
trainer() {
    run trainer 60 "$python" -m benchmarks.trainer --quick --shape "$shape" --device cuda \
        --dtype bfloat16 --json "$out/trainer.json"
}

# Measurements run alone; checks that only have to pass run at the same time.
if [ $# -eq 0 ]; then
    set -- versions correct card trainer
fi
: >"$out/summary.txt"
for name in "$@"; do
    case $name in
    versions | tests | demo | card | trainer) "$name" ;;
    correct)
        demo &
        tests
        wait
        ;;
    *) echo "unknown check: $name" >&2 && exit 64 ;;
    esac
done
echo
cat "$out/summary.txt"
! grep -qv 'exit=0 ' "$out/summary.txt"
