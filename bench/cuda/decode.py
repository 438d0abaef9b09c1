#!/usr/bin/env python3
"""INT2 decode attention on a GPU: correctness against float64, then time against the plain-read roof and, where given,
FlashAttention-3 on a BF16 cache and the published INT2 kernel, all in one run.

usage: decode.py LIBOSCAR_CUDA_SO ROOF_SO [--shape QO/KV/HEAD_DIM ...] [--fa3 FA3_SO] [--published DECODE_ATTENTION_PY]
                 [--json FILE] [--quick]
FA3_SO: the _vllm_fa3_C extension of a vLLM wheel. DECODE_ATTENTION_PY: srt/layers/attention/triton_ops/decode_attention.py of the
published code (FutureMLS-Lab/OSCAR). roofline.py draws the JSON.
"""
import argparse
import ctypes as C
import importlib.util
import json
import sys
import types

import torch

from oscar_cuda import Case, Library, graph_time

MAX_ERROR = 5e-3   # of the row's largest output: BF16 rounding of the output is 4e-3 at worst
SHAPES = ["32/8/128", "64/8/128", "32/32/128", "32/8/64", "32/8/256"]


def check(lib):
    cases = [  # lengths, Hq, Hk, D, keywords
        ([1, 63, 64, 65, 320, 321, 385, 1000, 4096 + 17], 32, 8, 128, {}),
        ([0, 5000, 700], 32, 8, 128, {}),
        ([3000, 129, 2048], 64, 8, 128, {}),
        ([3000, 129], 8, 8, 128, {}),
        ([3000, 129], 14, 2, 64, {}),
        ([3000, 777], 9, 3, 64, {}),
        ([3000, 777], 4, 1, 256, {}),
        ([2500, 400], 16, 1, 128, {}),
        ([2500, 90], 32, 8, 128, dict(query_length=4)),
        ([2500, 900], 32, 8, 128, dict(query_length=8)),
        ([2500, 900], 32, 8, 128, dict(sliding_window=1024)),
        ([2500, 900], 32, 8, 128, dict(soft_cap=20.0)),
        ([2500, 900], 32, 8, 128, dict(sink=16, recent=128)),
        ([2500, 900], 32, 8, 128, dict(sink=4, recent=64)),
        ([2500, 900], 32, 8, 128, dict(rotary_dim=64)),
        ([40000], 32, 8, 128, {}),
        ([40000, 70000], 4, 1, 128, dict(num_sms=1)),          # one block: rows of more pages than its page terms hold at once
        ([777, 0, 0, 0], 32, 8, 128, {}),                      # padded rows of a graph
        ([1 + 7 * i % 700 for i in range(512)], 32, 8, 128, {}),
    ]
    bad, largest = 0, 0.0
    for lengths, hq, hk, d, kw in cases:
        case = Case(lib, lengths, hq, hk, d, **kw)
        case.run()
        torch.cuda.synchronize()
        first = case.out.clone()
        worst = worst_lse = 0.0
        for b in range(case.B) if case.B < 64 else range(0, case.B, 37):
            ref, lse = case.reference(b)
            got = case.out[b].double()
            n = torch.isfinite(lse)
            if not torch.isfinite(got).all():
                worst = float("inf")
                continue
            if (got[~n] != 0).any():
                worst = float("inf")
            if n.any():
                top = ref[n].abs().amax(-1, keepdim=True)
                worst = max(worst, float(((got[n] - ref[n]).abs() / top).max()))
                worst_lse = max(worst_lse, float((case.lse[b].double()[n] - lse[n]).abs().max()))
            if n.any() and not torch.isneginf(case.lse[b][~n]).all():
                worst = float("inf")
        case.out.fill_(float("nan"))
        case.run()
        torch.cuda.synchronize()
        same = bool((case.out.view(torch.int16) == first.view(torch.int16)).all())
        ok = worst <= MAX_ERROR and same
        bad += not ok
        largest = max(largest, worst)
        lengths = lengths if len(lengths) < 16 else f"of {len(lengths)} requests"
        print(f"{'ok ' if ok else 'BAD'} lengths {lengths} heads {hq}/{hk} head_dim {d} {kw}: error {worst:.2e}, lse {worst_lse:.1e}, repeat equal {same}", flush=True)
    print(f"{len(cases) - bad} passed, {bad} failed, largest error {largest:.2e}", flush=True)
    return bad, largest


def fa3_time(operators, batch, context, hq, hk, d):
    """Best of three page sizes, the scheduler's metadata computed ahead."""
    size = batch * context * hk * d * 4
    layers = max(1, min(16, int(1.5e9 // size)))
    kv = torch.empty(layers, 2, batch * context, hk, d, device="cuda", dtype=torch.bfloat16)
    for l in range(layers):
        kv[l].normal_()
    q = torch.randn(batch, hq, d, device="cuda", dtype=torch.bfloat16)
    out, best = torch.empty_like(q), None
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    used = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    for page in (16, 64, 256):
        table = torch.randperm(batch * context // page, device="cuda", dtype=torch.int32).view(batch, -1)
        meta = operators.get_scheduler_metadata(batch, 1, context, hq, hk, d, d, torch.bfloat16, used, starts, None, None, None, None,
                                                page, 0, True, -1, -1, False, 0, None, 0)

        def call(i):
            k, v = (kv[i % layers][j].view(-1, page, hk, d) for j in (0, 1))
            operators.fwd(q, k, v, None, None, None, out, starts, None, None, None, used, 1, context, table, None, None, None, None, None,
                          None, None, None, d ** -0.5, True, -1, -1, 0.0, True, meta, 0, None, 0, None, 1, 0, None)

        us = graph_time(call, max(layers, 8 if size < 4e9 else 2))
        best = us if best is None else min(best, us)
    return best


def published_kernel(path):
    """The published kernel without the rest of its engine: what it imports from there is replaced by empty settings."""
    class Unset:
        def __getattr__(self, name):
            return types.SimpleNamespace(get=lambda *_: None)

    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.environ"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["sglang.srt.utils"].is_hip = lambda: False
    sys.modules["sglang.srt.environ"].envs = Unset()
    spec = importlib.util.spec_from_file_location("published_decode_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.decode_attention_fwd_grouped_quant_int2


def published_time(kernel, batch, context, hq, hk, d):
    """Best of the split counts, its own tile sizes; its own cache of 2-bit codes and float pairs, no BF16 window."""
    tokens = batch * context
    layers = max(1, min(16, int(1e9 // (tokens * hk * (d / 2 + 16)))))
    codes = torch.randint(0, 256, (layers, 2, tokens, hk, d // 4), device="cuda", dtype=torch.uint8)
    pairs = torch.empty(layers, 2, tokens, hk, 2, device="cuda").uniform_(0.2, 1.6)
    q = torch.randn(batch, hq, d, device="cuda", dtype=torch.bfloat16)
    out, best = torch.empty_like(q), None
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * context
    slots = (torch.randperm(tokens // 64, device="cuda")[:, None] * 64 + torch.arange(64, device="cuda")).view(-1)
    for splits in (4, 8, 16, 32, 64):
        if batch * splits > 1024 and splits > 8:
            continue
        parts, lse = torch.empty(batch, hq, splits, d, device="cuda"), torch.empty(batch, hq, splits, device="cuda")
        counts = torch.full((batch,), splits, device="cuda", dtype=torch.int32)

        def call(i):
            c, p = codes[i % layers], pairs[i % layers]
            kernel(q, c[0], c[1], p[0], p[1], out, starts, slots, parts, lse, counts, splits, d ** -0.5)

        us = graph_time(call, max(layers, 2), 9)
        best = us if best is None else min(best, us)
    return best


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("library")
    ap.add_argument("roof")
    ap.add_argument("--json")
    ap.add_argument("--quick", action="store_true")
    ap.add_argument("--shape", action="append")
    ap.add_argument("--fa3")
    ap.add_argument("--published")
    a = ap.parse_args()
    lib, roof = Library(a.library), C.CDLL(a.roof)
    if a.fa3:
        torch.ops.load_library(a.fa3)
    published = published_kernel(a.published) if a.published else None
    bad, largest = check(lib)
    sink_buffer = torch.zeros(64, device="cuda", dtype=torch.int32)
    big = torch.randint(0, 2**31 - 1, (5 * 2**30 // 4,), device="cuda", dtype=torch.int32)

    def read_time(n):
        n = int(n) // 4096 * 4096
        slots = max(1, min(16, big.numel() * 4 // n))
        best = 1e9
        for blocks in (132, 264, 528, 1056):
            def f(i):
                roof.oscar_bench_read(C.c_void_p(big.data_ptr() + (i % slots) * n), C.c_size_t(n), blocks, C.c_void_p(sink_buffer.data_ptr()),
                                      C.c_void_p(torch.cuda.current_stream().cuda_stream))
            best = min(best, graph_time(f, max(8, slots) if n < 1e9 else 2, 9))
        return best

    peak = 4.5e9 / read_time(4.5e9) * 1e-6
    print(f"plain read of 4.5 GB: {peak:.3f} TB/s")
    case = Case(lib, [8192] * 64, 32, 8, 128)
    print(f"schedule of 64 requests, once a step: {graph_time(lambda i: case.schedule(), 8):.2f} us")
    del case
    series = []
    for shape in a.shape or SHAPES:
        hq, hk, d = map(int, shape.split("/"))
        rows = []
        print(f"\n{hq} query heads, {hk} KV heads, head_dim {d}\n| batch | context | MB | plain read us | us | of the roof | overlapped us | of the roof | FA3 BF16 us | ratio | published us | ratio |\n" + "| --- " * 12 + "|")
        for b, ctx in [(1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (8, 131072), (32, 8192), (32, 32768), (64, 8192), (64, 32768)] + ([] if a.quick else [(32, 131072), (64, 131072)]):
            per_layer = b * ctx * hk * (d / 2 + 4)
            layers = int(max(1, min(16, 2e9 // per_layer)))
            case = Case(lib, [ctx] * b, hq, hk, d, layers=layers)
            calls = max(layers, 8 if per_layer < 1e9 else 3)
            us = graph_time(case.run, calls)
            case.params = [case.make(l, 1) for l in range(layers)]
            us_dependent = graph_time(case.run, calls)
            n = case.bytes()
            del case
            torch.cuda.empty_cache()
            row = dict(batch=b, context=ctx, megabytes=n / 1e6, us=us, us_dependent=us_dependent,
                       read_us=read_time(n) if n < 4e9 else n / peak * 1e-6, roof_percent=100 * n / peak * 1e-6 / us)
            if a.fa3:
                row["fa3_bf16_us"] = fa3_time(torch.ops._vllm_fa3_C, b, ctx, hq, hk, d)
                torch.cuda.empty_cache()
            if published and b * ctx >= 262144:
                row["published_us"] = published_time(published, b, ctx, hq, hk, d)
                torch.cuda.empty_cache()
            rows.append(row)
            rival = lambda key: f"{row[key]:.1f} | {row[key] / us_dependent:.2f}" if key in row else "- | -"
            print(f"| {b} | {ctx} | {n / 1e6:.1f} | {row['read_us']:.2f} | {us:.2f} | {row['roof_percent']:.1f} % | {us_dependent:.2f} | "
                  f"{row['roof_percent'] * us / us_dependent:.1f} % | {rival('fa3_bf16_us')} | {rival('published_us')} |", flush=True)
        series.append(dict(name=shape, shape=shape, rows=rows))
    if a.json:
        json.dump(dict(device=torch.cuda.get_device_name(), peak_tbps=peak, failed=bad, largest_error=largest, series=series), open(a.json, "w"), indent=1)
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
