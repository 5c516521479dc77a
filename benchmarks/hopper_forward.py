"""Checks the Hopper forward against a float64 token recurrence, then times it.

PYTHONPATH=. python benchmarks/hopper_forward.py check [schedule ..]|time [rows.json] [flashkda.so]|host|once
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from functools import cache, partial
from time import perf_counter

import flash_kda
import torch
import triton

from openkda.ops.kda.hopper import launch
from openkda.ops.kda.hopper.schedule import Window, choose, is_split

BOUND = -5.0


def reference(q, k, v, g, beta, a_log, dt, s0, lens):
    """Float64 token recurrence, all sequences of a pack side by side. Shapes as the op; returns output, states."""
    d = torch.float64
    q, k, v, g, beta = (x[0].to(d) for x in (q, k, v, g, beta))
    rep = v.shape[1] // q.shape[1]
    q = (q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * 128**-0.5).repeat_interleave(rep, 1)
    k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(rep, 1)
    decay = (BOUND * torch.sigmoid(a_log.to(d).exp()[None, :, None] * (g + dt.to(d)))).exp()
    beta = beta.sigmoid()
    o = torch.zeros_like(v)
    n = len(lens)
    s = torch.zeros(n, v.shape[1], 128, 128, dtype=d, device=v.device) if s0 is None else s0.to(d).clone()
    starts = torch.tensor([0, *lens]).cumsum(0)[:-1]
    for t in range(max(lens)):
        live = torch.tensor([i for i in range(n) if lens[i] > t], device=v.device)
        row = (starts.to(v.device)[live] + t).long()
        sl = s[live] * decay[row][..., None]
        u = beta[row][..., None] * (v[row] - torch.einsum("nhk,nhkv->nhv", k[row], sl))
        sl = sl + k[row][..., None] * u[..., None, :]
        s[live] = sl
        o[row] = torch.einsum("nhk,nhkv->nhv", q[row], sl)
    return o[None], s


def inputs(lens, h, hv, shift, kind="normal", seed=0, state=True):
    gen = torch.Generator(device="cuda").manual_seed(seed)
    r = partial(torch.randn, generator=gen, device="cuda")
    t = sum(lens)
    q, k = r(1, t, h, 128).bfloat16(), r(1, t, h, 128).bfloat16()
    v, g = r(1, t, hv, 128).bfloat16(), (r(1, t, hv, 128) + shift).bfloat16()
    beta = r(1, t, hv).bfloat16()
    if kind == "near":
        k = (r(1, 1, h, 128) + 0.02 * r(1, t, h, 128)).bfloat16()
        beta = torch.full_like(beta, 6.0)
    a_log, dt = 0.2 * r(hv), 0.2 * r(hv, 128)
    s0 = 0.1 * r(len(lens), hv, 128, 128) if state else None
    return q, k, v, g, beta, a_log, dt, s0


@cache
def offsets(lens):
    return torch.tensor([0, *lens], device="cuda").cumsum(0).int() if len(lens) > 1 else None


def run(args, lens, final=True, schedule=None):
    q, k, v, g, beta, a_log, dt, s0 = args
    return launch.forward(
        q,
        k,
        v,
        g,
        beta,
        a_log,
        dt,
        scale=128**-0.5,
        lower_bound=BOUND,
        initial_state=s0,
        final_state=final,
        cu_seqlens=offsets(tuple(lens)),
        schedule=schedule,
    )


def rel(a, ref):
    return ((a.double() - ref).norm() / ref.norm().clamp_min(1e-30)).item()


def in_one_window(args, lens):
    """Two passes without windows."""
    real = launch.windows
    launch.windows = lambda chunks, heads, sms: (Window(chunks, is_split(heads, sms)),)
    try:
        return run(args, lens, schedule="two_pass")
    finally:
        launch.windows = real


@contextmanager
def device_of(sms):
    """The launches choose as if the device had so many SMs."""
    real, launch._sm_count = launch._sm_count, lambda index: sms
    try:
        yield
    finally:
        launch._sm_count = real


CASES = [
    ("one chunk", [64], 2, 2, 0.0, "normal", True),
    ("two chunks", [128], 2, 2, 0.0, "normal", False),
    ("fast", [512], 4, 4, 0.0, "normal", True),
    ("slow", [512], 4, 4, -6.0, "normal", True),
    ("slower", [512], 4, 4, -10.0, "normal", True),
    ("saturated", [512], 4, 4, 8.0, "normal", True),
    ("near keys", [512], 4, 4, -10.0, "near", True),
    ("near keys fast", [512], 4, 4, 0.0, "near", True),
    ("partial", [397], 4, 4, -3.0, "normal", True),
    ("short", [5], 2, 2, 0.0, "normal", True),
    ("pack", [1, 130, 0, 64, 63, 200, 17], 2, 2, -2.0, "normal", True),
    ("grouped", [200], 2, 6, -2.0, "normal", True),
]


SCHEDULES = ["fused", "two_pass", ("segments", 3)]


def check():
    bad = 0
    chosen = [s for s in SCHEDULES if (s if isinstance(s, str) else s[0]) in sys.argv[2:]] or SCHEDULES
    for name, lens, h, hv, shift, kind, state in CASES:
        args = inputs(lens, h, hv, shift, kind, state=state)
        ro, rs = reference(*args, lens)
        line = ""
        for schedule in chosen:
            if schedule[0] == "segments" and len(lens) > 1:
                continue
            o, s = run(args, lens, schedule=schedule)
            o2, s2 = run(args, lens, schedule=schedule)
            same = torch.equal(o, o2) and torch.equal(s, s2)
            with device_of(3):  # every program walks over several chunks or sequences
                o3, s3 = run(args, lens, schedule=schedule)
            eo, es = max(rel(o, ro), rel(o3, ro)), max(rel(s, rs), rel(s3, rs))
            ok = eo < 3e-3 and es < 1e-3 and same
            bad += not ok
            line += f" | {schedule if isinstance(schedule, str) else schedule[0]} {'ok' if ok else 'FAIL'} {eo:.2e} {es:.2e}"
            line += "" if same else " NOT DETERMINISTIC"
            if not ok:
                e = (o.double() - ro)[0].norm(dim=-1) / ro[0].norm(dim=-1).clamp_min(1e-9)
                line += " " + str([f"{x:.0e}" for x in e[:, 0].tolist()[:: max(1, len(e) // 12)]])
        print(f"{name:15s}{line}", flush=True)
    return bad


SHAPES = [
    ("H=96 1x8192", [8192], 96),
    ("H=96 8x1024", [1024] * 8, 96),
    ("H=96 mixed", [1300, 547, 2048, 963, 271, 3063], 96),
    ("H=64 1x8192", [8192], 64),
    ("H=64 8x1024", [1024] * 8, 64),
    ("H=32 1x8192", [8192], 32),
    ("H=24 1x8192", [8192], 24),
    ("H=16 1x8192", [8192], 16),
    ("H=8 1x8192", [8192], 8),
    ("H=32 8x1024", [1024] * 8, 32),
    ("H=12 8x1024", [1024] * 8, 12),
    ("H=16 1x65536", [65536], 16),
    ("H=12 1x8192", [8192], 12),
]


def graphed(fn):
    """Milliseconds of fn replayed from a CUDA graph, caches cold, median."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return triton.testing.do_bench(graph.replay, warmup=5, rep=40, return_mode="median")


def time():
    """Every schedule that can run a shape, fast and slow gates in turns; with FlashKDA where its library is named. The rows go
    to a file where one is named."""
    library = next((a for a in sys.argv[2:] if a.endswith(".so")), None)
    target = next((a for a in sys.argv[2:] if a.endswith(".json")), None)
    rows = []
    for name, lens, h in SHAPES:
        args = [inputs(lens, h, h, shift, state=len(lens) > 1) for shift in (0.0, -6.0)]
        chosen = choose(sum(lens), len(lens), h, len(lens) > 1, launch._sm_count(0))
        schedules = dict.fromkeys([chosen, "fused", "two_pass"] if len(lens) > 1 or h > 64 else [chosen, "two_pass"])
        calls = {str(s): [partial(run, a, lens, schedule=s) for a in args] for s in schedules}
        if len(lens) == 1 and len(launch.windows(lens[0] // 64, h, launch._sm_count(0))) > 1:
            calls["one window"] = [partial(in_one_window, a, lens) for a in args]
        if library:
            calls["FlashKDA"] = [flash_kda.call(library, a, lens, offsets(tuple(lens))) for a in args]
        for who, (fast, slow) in calls.items():
            ms = [graphed(fn) for fn in ((fast, slow) if who == "FlashKDA" else (fast, slow, fast, slow))]
            row = {"case": name, "who": who, "chosen": who == str(chosen), "fast": min(ms[::2]), "slow": min(ms[1::2])}
            if who == str(chosen):
                row["eager"] = triton.testing.do_bench(fast, warmup=5, rep=20, return_mode="median")
            rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            print(
                f"{name:14s} {who:16s}",
                *(f"{k} {v}" for k, v in rows[-1].items() if k not in ("case", "who")),
                flush=True,
            )
        del args, calls
    if target:
        with open(target, "w") as file:
            json.dump(rows, file, indent=1)


def host():
    """Microseconds of host time a call, on inputs small enough that the device is never waited for."""
    args = inputs([1024], 2, 2, 0.0, state=False)
    for schedule in SCHEDULES:
        best = float("inf")
        for _ in range(6):  # the first compiles
            torch.cuda.synchronize()
            start = perf_counter()
            for _ in range(100):
                run(args, [1024], schedule=schedule)
            best = min(best, (perf_counter() - start) * 1e4)
        print(f"{schedule!s:18s} {best:.0f} us a call", flush=True)


def once():
    """One launch for a profiler."""
    for _ in range(2):
        run(inputs([2048], 96, 96, 0.0, state=False), [2048], schedule=sys.argv[2] if len(sys.argv) > 2 else None)
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit({"check": check, "time": time, "host": host, "once": once}[sys.argv[1]]() or 0)
