#!/usr/bin/env bash
# What to measure on a GPU, most telling first: bash results/gpu.sh [FOLDER [TEXT [PART...]]]
#
# FOLDER (default: runs/gpu) gets what each command prints, its JSON and its runs. TEXT is a file with tiny Shakespeare;
# by default it is downloaded. Without a PART, those that end within ten minutes are run: default step generate loss
# 124m. Others: eager train costs pays norms claims tests. `all` is every one. First, the longest time that each command
# may take is printed, and the sum. Each is killed after that, and the next one starts in any case. What is compiled is
# cached in a temporary folder. PYTHON names another interpreter.
set -u
text=${2:-shakespeare}
[ -e "$text" ] && text=$(realpath "$text")
out=$(realpath -m "${1:-runs/gpu}")
parts=${*:3}
cd "$(dirname "$0")/.."
mkdir -p "$out"

run() { # seconds, part, name of its cache, arguments of python
    local limit=$1 part=$2 cache=$compiled/$3 code
    shift 3
    case " ${parts:-default step generate loss 124m} " in *" $part "* | *" all "*) ;; *) return ;; esac
    if [ "$planning" ]; then
        echo "at most $limit s: $part: python $*" >&2
        total=$((total + limit))
        return
    fi
    echo "\$ python $*" >>"$out/$part.txt"
    SECONDS=0
    TORCHINDUCTOR_CACHE_DIR=$cache timeout -k 5 "$limit" "${PYTHON:-python}" "$@" >>"$out/$part.txt" 2>&1 </dev/null
    code=$?
    echo "$part: exit $code after $SECONDS s: python $*" | tee -a "$out/summary.txt"
}

# nanoGPT's model for tiny Shakespeare, until its published validation loss of 1.4697 nats per character.
model="--data $text --tokenizer bytes --layers 6 --heads 6 --dim 384 --context 256 --batch-size 64 --dropout 0.2"
loss="$model --lr 0.005 --steps 800 --eval-every 130 --save-every 800"
# What the compiled step of small costs with each, over that of llama.
costs="--recipe=llama --recipe=qwen3 --recipe=gemma3 --recipe=olmo2 --recipe=muse_glimmer --recipe=cohere"
costs="$costs --norm=layernorm --norm=dyt --norm=seednorm --placement=post --placement=ngpt --placement=mhc"

list() {
    run 100 default cold train.py --device cuda --out "$out/default"
    run 60 default cold train.py --device cuda --out "$out/default-warm"
    for how in blocks whole; do
        run 60 step "$how" results/step.py "$how" "$out/step-$how.txt" --device cuda --out "$out/step-$how"
    done
    run 110 generate generate bench.py generate --preset 1b --samples 64 --rounds 3 --compile --device cuda --json "$out/generate.json"
    run 80 loss loss train.py --device cuda $loss --compile --out "$out/loss"
    run 80 124m 124m bench.py train --preset 124m --vocab-size 50304 --compile --device cuda --json "$out/train-124m.json"
    run 45 eager eager results/step.py eager "$out/step-eager.txt" --device cuda --out "$out/step-eager"
    run 120 eager eager train.py --device cuda $loss --no-compile --out "$out/loss-eager"
    run 120 train train bench.py train --preset 1b --compile --device cuda --json "$out/train-1b.json"
    run 90 train train bench.py train --preset 124m --context 2048 --micro-batch-size 6 --compile --device cuda --json "$out/train-124m-2048.json"
    run 120 train train bench.py train --preset 1b --no-compile --device cuda --json "$out/train-1b-eager.json"
    for cost in $costs; do
        run 60 costs costs bench.py train --preset small $cost --compile --rounds 30 --device cuda --json "$out/step${cost#-}.json"
    done
    run 480 pays pays ablate.py --device cuda --preset small --factor recipe=llama,gemma3 --equal time --compile --seeds 4 --jobs 4 \
        --lr 0.005 --lrs 0.002 0.0032 0.008 --out "$out/pays"
    run 60 norms norms bench.py norms --rows 65536 --dim 1024 --compile --device cuda --json "$out/norms-65536-1024.json"
    run 60 norms norms bench.py norms --rows 8192 --dim 4096 --compile --device cuda --json "$out/norms-8192-4096.json"
    run 60 norms norms bench.py norms --rows 16384 --dim 8192 --compile --device cuda --json "$out/norms-16384-8192.json"
    run 480 claims claims ablate.py --norms rmsnorm layernorm dyt --placements pre post --preset small --steps 200 --seeds 2 \
        --device cuda --out "$out/claims"
    run 480 tests tests -m pytest -q -m gpu
}

total=0 planning=yes compiled=
list
if [ "$total" = 0 ]; then
    echo "error: no command has the part $parts; see the head of $0" >&2
    exit 2
fi
echo "at most $total s in total" >&2
planning=
compiled=$(mktemp -d)
trap 'rm -rf "$compiled"' EXIT
list
