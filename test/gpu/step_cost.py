"""What filing a step costs: the scheduler's thread and the GPU, at once against through the ring.

python test/gpu/step_cost.py        prints a JSON line a case; medians of 300 steps, 48 layers x 8 of 128 experts
"""

import json
import statistics
import time

import torch

from sglang.srt.layers.moe.routed_experts import kernels
from sglang.srt.layers.moe.routed_experts.policy import RowShape
from sglang.srt.layers.moe.routed_experts.store import RowFiler

SHAPE = RowShape(num_layers=48, top_k=8, num_experts=128)
STEPS = 300


def main() -> None:
    filer = RowFiler(8192, SHAPE, "cuda")
    filer.open(200_000)
    buffer = torch.zeros((48, 8192, 8), dtype=torch.int32, device="cuda")
    spread = kernels.MOST_SPREAD_TOKENS
    for tokens in (1, 64, 256, 512, 8192):
        slots = torch.randperm(199_999, device="cuda")[:tokens] + 1
        for way in ("at once", "ring"):
            # The ring is asked for by leaving no token to the kernel that files at once; pack still spreads its programs.
            kernels.MOST_SPREAD_TOKENS = tokens if way == "at once" else 0
            host, forward, both = [], [], []
            for _ in range(STEPS + 20):
                torch.cuda.synchronize()
                begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                torch.cuda._sleep(
                    300_000
                )  # a forward in flight: the host runs ahead, as in serving
                begin.record()
                started = time.perf_counter()
                filer.file_step(buffer, 0, slots)
                host.append(1e6 * (time.perf_counter() - started))
                middle.record()
                torch.cuda.current_stream().wait_event(filer._side_filed or middle)
                end.record()
                torch.cuda.synchronize()
                forward.append(1e3 * begin.elapsed_time(middle))
                both.append(1e3 * begin.elapsed_time(end))
            row = {"tokens": tokens, "way": way}
            for name, values in (
                ("host_us", host),
                ("forward_stream_us", forward),
                ("filed_us", both),
            ):
                kept = sorted(values[20:])
                row[name] = round(statistics.median(kept), 1)
                row[name + "_p90"] = round(kept[int(0.9 * len(kept))], 1)
            print(json.dumps(row), flush=True)
    kernels.MOST_SPREAD_TOKENS = spread


if __name__ == "__main__":
    main()
