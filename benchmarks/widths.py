"""What attention costs by head width: the extra channels make 72 of 64, and kernels have their favourite sizes.

python benchmarks/widths.py --tokens 512 2048
python benchmarks/widths.py --device cuda --dtype bfloat16 --heads 32 --kv-heads 4
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

WIDTHS = (64, 66, 72, 80, 96, 128)


def main() -> None:
    """Print, for each length and width, forward and backward time over that of the first width."""
    arguments = parse()
    print("| tokens | width | forward ms | ratio | backward ms | ratio |\n| ---: | ---: | ---: | ---: | ---: | ---: |")
    for tokens in arguments.tokens:
        for line in measure(arguments, tokens):
            print(line)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


def measure(arguments: argparse.Namespace, tokens: int) -> list[str]:
    """One line a width, medians of alternating runs."""
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    wait = torch.cuda.synchronize if arguments.device.startswith("cuda") else lambda: None
    options = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype), "requires_grad": True}
    inputs = {
        width: [
            torch.randn(1, heads, tokens, width, **options) for heads in (arguments.heads, *2 * [arguments.kv_heads])
        ]
        for width in WIDTHS
    }
    times: dict[int, list[tuple[float, float]]] = {width: [] for width in WIDTHS}
    for _ in range(arguments.repeats + 2):
        for width, tensors in inputs.items():
            start = clock()
            output = scaled_dot_product_attention(*tensors, is_causal=True, scale=0.125, enable_gqa=True)
            wait()
            middle = clock()
            output.backward(output.detach())
            wait()
            times[width].append((middle - start, clock() - middle))
    lines = []
    for width in WIDTHS:
        cells = [tokens, width]
        for part in (0, 1):
            own, first = ([t[part] for t in times[w][2:]] for w in (width, WIDTHS[0]))
            ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
            cells += [f"{statistics.median(own) * 1e3:.2f}", f"{ratio:.3f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


if __name__ == "__main__":
    main()
