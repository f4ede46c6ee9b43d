"""This module times one batch on a toy machine.

Memory, link and processors do a byte per nanosecond, and a copy begins after 5 ns. An expert has 40
bytes, the dense part 10. The token uses two experts, and neither is there yet.
"""

from moetier.sim.testing import run, toy_header, toy_profile, toy_trace

MODEL = toy_header(expert_bytes=40, dense_bytes=10, n_experts=4, top_k=2)
TOKEN = toy_trace(MODEL, [[[0, 1]]])
PLAIN = toy_profile(latency="5 ns")
SLOWED = toy_profile(latency="5 ns", contention={"compute_slowdown": "50 %", "source": "a toy"})
TWO_LANES = toy_profile(
    latency="5 ns",
    lanes=2,
    bandwidth=[
        {"size": "40 B", "lanes": 1, "rate": "800 MB/s"},
        {"size": "40 B", "lanes": 2, "rate": "1 GB/s"},  # both together
    ],
)

for name, batch in {
    "one lane": run(TOKEN, PLAIN),
    "two lanes": run(TOKEN, TWO_LANES),
    "overlap": run(TOKEN, PLAIN, overlap=True),
    "overlap, compute slowed by copies": run(TOKEN, SLOWED, overlap=True),
    "missed experts on the CPU": run(TOKEN, PLAIN, {"miss": "cpu"}),
}.items():
    dense, wait, experts = (batch.column(f"{part}_ns")[0] for part in ("dense", "wait", "expert"))
    print(f"{name:34}{dense:4} +{wait:3} +{experts:3} ={dense + wait + experts:4} ns")
