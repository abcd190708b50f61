#!/usr/bin/env bash
# Section D of the benchmarks on one GPU, the TinyLlama shape in bfloat16, in under 12 minutes: bash benchmarks/gpu.sh OUT [PYTHON]
# It has not run yet: no GPU could be had. First the question on which the rest hangs: what 72 channels cost where kernels
# like 64. Then every step with sdpa and, where the packages are there, flash attention and Liger's kernels in both arms.
set -uo pipefail
out=${1:?usage: benchmarks/gpu.sh OUT [PYTHON]}
python=${2:-python}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out"
has() { "$python" -c "import $1" 2>/dev/null; }

timed() { # name, seconds at most, command
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 || echo "$name: exit $?"
  echo "$name: $((SECONDS - start)) s"
}

timed widths 40 "$python" benchmarks/widths.py --device cuda --dtype bfloat16 --heads 32 --kv-heads 4
common=(--device cuda --dtype bfloat16 --model tinyllama)
shapes=(--train 4x1024 1x4096 --lora 4x1024 --prefill 4x512 1x2048 1x8192 --decode 1x512 32x512 --memory 4x1024)
backends=(sdpa)
has flash_attn && backends+=(flash_attention_2)
for attention in "${backends[@]}"; do
  timed "$attention" 130 "$python" benchmarks/overhead.py "${common[@]}" --attention "$attention" "${shapes[@]}" --output "$out/$attention"
  if has liger_kernel; then
    timed "$attention-liger" 90 "$python" benchmarks/overhead.py "${common[@]}" --attention "$attention" --liger \
      --train 4x1024 1x4096 --lora --prefill 1x2048 --decode --memory 4x1024 --output "$out/$attention-liger"
  fi
done
timed generation 60 "$python" benchmarks/generation.py "${common[@]}" --batch 1 32 --repeats 3 --output "$out/generation.json"
timed generation-static 120 "$python" benchmarks/generation.py "${common[@]}" --batch 1 8 --repeats 3 --cache static --compile \
  --output "$out/generation-static.json"
