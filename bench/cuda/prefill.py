#!/usr/bin/env python3
"""INT2 prefill on a GPU: a chunk of queries over the 2-bit history, against float64, then time against FlashAttention-3 on a
BF16 cache of the same lengths in the same run.

usage: prefill.py LIBOSCAR_CUDA_SO [--fa3 FA3_SO] [--json FILE] [--check-only]
FA3_SO: _vllm_fa3_C of a vLLM wheel; without it no peer is timed.
"""
import argparse
import ctypes as C
import json
import math

import torch

from oscar_cuda import PAGE, Case, Library, graph_time

MAX_ERROR = 5e-3  # of the row's largest output: BF16 rounding of the output is 3.9e-3 at worst, FP16 queries and weights add to it
WINDOW_BLOCK = 16


class Shape(C.Structure):
    _fields_ = [("struct_size", C.c_size_t)] + [(n, C.c_int32) for n in "num_requests num_tokens num_qo_heads num_kv_heads head_dim max_pages sink recent".split()]


class Params(C.Structure):
    _fields_ = ([("struct_size", C.c_size_t), ("sliding_window", C.c_int32), ("scale", C.c_float), ("soft_cap", C.c_float)]
                + [(n, C.c_void_p) for n in "query_start history_lens q".split()] + [("q_token_stride", C.c_int64), ("q_head_stride", C.c_int64)]
                + [("pages", C.c_void_p), ("block_table", C.c_void_p)] + [(n, C.c_int64) for n in "block_table_stride page_stride_bytes head_stride_bytes".split()]
                + [(n, C.c_void_p) for n in "window_k window_v window_table".split()]
                + [(n, C.c_int64) for n in "window_table_stride window_block_stride window_token_stride window_head_stride".split()]
                + [("window_block", C.c_int32)] + [(n, C.c_void_p) for n in "key_matrix key_transform value_transform value_matrix block_means".split()]
                + [("num_blocks", C.c_int32)] + [(n, C.c_void_p) for n in "key_offset value_offset out".split()]
                + [("out_token_stride", C.c_int64), ("out_head_stride", C.c_int64), ("lse", C.c_void_p), ("workspace", C.c_void_p)])


class Merge(C.Structure):
    _fields_ = ([("struct_size", C.c_size_t)] + [(n, C.c_int32) for n in "num_tokens num_heads head_dim".split()] + [("out", C.c_void_p), ("lse", C.c_void_p)]
                + [("out_token_stride", C.c_int64), ("out_head_stride", C.c_int64), ("other", C.c_void_p), ("other_lse", C.c_void_p)]
                + [(n, C.c_int64) for n in "other_token_stride other_head_stride other_lse_token_stride other_lse_head_stride".split()])


def stream():
    return C.c_void_p(torch.cuda.current_stream().cuda_stream)


class History(Case):
    """Random cache of `histories` tokens a request and `chunks` query tokens each."""

    def __init__(self, lib, histories, chunks, num_qo_heads, num_kv_heads, head_dim, sink=64, recent=256, sliding_window=0, soft_cap=0.0, means=True, seed=0):
        dev, g = "cuda", torch.Generator(device="cuda").manual_seed(seed)
        self.lib, self.D, self.Hq, self.Hk, self.lengths, self.chunks = lib, head_dim, num_qo_heads, num_kv_heads, histories, chunks
        self.sink, self.recent, self.sw, self.cap = sink, recent, sliding_window, soft_cap
        B, D, Hk, T = len(histories), head_dim, num_kv_heads, sum(chunks)
        self.half = 16 * D + 128
        page_bytes, max_pages = 2 * self.half, max(1, max(-(-n // PAGE) for n in histories))
        blocks = sum(max(1, -(-n // PAGE)) for n in histories)
        self.pages = torch.randint(0, 256, (1, blocks, Hk, page_bytes), device=dev, generator=g, dtype=torch.int32).byte()
        signed = self.pages.view(torch.int8)
        for half in (0, self.half):            # scales near 1, offsets anywhere
            s = signed[..., half + 16 * D:half + 16 * D + PAGE]
            s.copy_((s.int() >> 3) - 4)
        self.table = torch.zeros(B, max_pages, device=dev, dtype=torch.int32)
        order, at = torch.randperm(blocks, device=dev, generator=g).int(), 0
        for b, n in enumerate(histories):
            k = max(1, -(-n // PAGE))
            self.table[b, :k] = order[at:at + k]
            at += k
        # only the window's blocks exist, every other entry points at a block of NaN
        live = [sorted({j // WINDOW_BLOCK for j in list(range(min(sink, n))) + list(range(max(0, n - recent + 1), n))}) for n in histories]
        shape = (1, 1 + sum(map(len, live)), WINDOW_BLOCK, Hk, D)
        self.wk, self.wv = (torch.randn(shape, device=dev, generator=g).bfloat16() for _ in range(2))
        self.wk[:, 0] = self.wv[:, 0] = float("nan")
        self.wtable = torch.zeros(B, max(1, -(-max(histories) // WINDOW_BLOCK)), device=dev, dtype=torch.int32)
        i = 1
        for b, ids in enumerate(live):
            if ids:
                self.wtable[b, torch.tensor(ids, device=dev)] = torch.arange(i, i + len(ids), device=dev, dtype=torch.int32)
            i += len(ids)
        self.q = torch.randn(T, Hq := num_qo_heads, D, device=dev, generator=g).bfloat16()
        turn = lambda: torch.linalg.qr(torch.randn(Hk, D, D, device=dev, generator=g, dtype=torch.float64))[0] * torch.exp(.5 * torch.randn(Hk, 1, D, device=dev, generator=g))
        ka, va = turn(), turn()
        self.ka, self.va, self.km, self.vm = (x.float().contiguous() for x in (ka, va, torch.linalg.inv(ka).mT, torch.linalg.inv(va)))
        self.means = torch.randn(max_pages, Hk, D, device=dev, generator=g) if means else None
        self.ko, self.vo = (torch.stack([torch.randn(Hk, device=dev, generator=g) * .3, torch.full((Hk,), .01, device=dev)], 1).contiguous() for _ in range(2))
        self.start = torch.tensor([0] + torch.tensor(chunks).cumsum(0).tolist(), device=dev, dtype=torch.int32)
        self.lens = torch.tensor(histories, device=dev, dtype=torch.int32)
        self.out = torch.full_like(self.q, float("nan"))
        self.lse = torch.full((T, Hq), float("nan"), device=dev)
        self.scale = D ** -0.5
        self.shape = Shape(C.sizeof(Shape), B, T, Hq, Hk, D, max_pages, sink, recent)
        size = C.c_size_t()
        lib.check(lib.lib.oscar_cuda_prefill_workspace(C.byref(self.shape), C.byref(size)))
        self.ws = torch.empty(size.value + 1024, device=dev, dtype=torch.uint8).fill_(255)
        ptr = lambda t: None if t is None else t.data_ptr()
        self.params = Params(C.sizeof(Params), sliding_window, self.scale, soft_cap, ptr(self.start), ptr(self.lens), ptr(self.q), Hq * D, D, ptr(self.pages), ptr(self.table),
                             max_pages, Hk * page_bytes, page_bytes, ptr(self.wk), ptr(self.wv), ptr(self.wtable), self.wtable.stride(0), WINDOW_BLOCK * Hk * D, Hk * D, D,
                             WINDOW_BLOCK, ptr(self.km), ptr(self.ka), ptr(self.va), ptr(self.vm), ptr(self.means), max_pages, ptr(self.ko), ptr(self.vo), ptr(self.out), Hq * D, D,
                             ptr(self.lse), -(-ptr(self.ws) // 1024) * 1024)

    def run(self, i=0):
        self.lib.check(self.lib.lib.oscar_cuda_prefill(C.byref(self.shape), C.byref(self.params), stream()))

    def merge(self, other, other_lse):
        """other [tokens, heads, D] bf16, other_lse [heads, tokens]."""
        T, Hq, D = self.q.shape
        m = Merge(C.sizeof(Merge), T, Hq, D, self.out.data_ptr(), self.lse.data_ptr(), Hq * D, D, other.data_ptr(), other_lse.data_ptr(),
                  other.stride(0), other.stride(1), other_lse.stride(1), other_lse.stride(0))
        self.lib.check(self.lib.lib.oscar_cuda_merge(C.byref(m), stream()))

    def reference(self, b, l=0):
        """Output [chunk, Hq, D] and LSE of request b in float64."""
        n, chunk, group = self.lengths[b], self.chunks[b], self.Hq // self.Hk
        out = torch.zeros(chunk, self.Hq, self.D, dtype=torch.float64, device="cuda")
        lse = torch.full((chunk, self.Hq), -math.inf, dtype=torch.float64, device="cuda")
        if n == 0:
            return out, lse
        yk, yv = (x[:n] for x in self.unpack(b, l))
        j, i = torch.arange(n, device="cuda"), n + torch.arange(chunk, device="cuda")[:, None]
        at = self.wtable[b][j // WINDOW_BLOCK].long()
        wk, wv = self.wk[0][at, j % WINDOW_BLOCK].double(), self.wv[0][at, j % WINDOW_BLOCK].double()
        exact = (j < self.sink) | (j > i - self.recent)
        seen = (j > i - self.sw) if self.sw else torch.ones_like(exact)
        for h in range(self.Hq):
            kv = h // group
            q = self.q[self.start[b]:self.start[b + 1], h].double()
            x = (q @ self.km[kv].double()) @ yk[:, kv].T
            if self.means is not None:
                x = x + (q @ self.means[:, kv].double().T)[:, j // PAGE]
            x = torch.where(exact, q @ wk[:, kv].nan_to_num().T, x) * self.scale
            if self.cap:
                x = self.cap * torch.tanh(x / self.cap)
            x = x.masked_fill(~seen, -math.inf)
            p = torch.softmax(x, 1).nan_to_num()
            out[:, h] = (p * ~exact) @ yv[:, kv] @ self.vm[kv].double() + (p * exact) @ wv[:, kv].nan_to_num()
            lse[:, h] = torch.logsumexp(x, 1)
        return out, lse


def compare(got, got_lse, ref, lse):
    if not torch.isfinite(got).all() or torch.isnan(got_lse).any():
        return math.inf, math.inf
    n = torch.isfinite(lse)
    if (got[~n] != 0).any() or torch.isfinite(got_lse[~n]).any():
        return math.inf, math.inf
    if not n.any():
        return 0.0, 0.0
    return float(((got[n] - ref[n]).abs() / ref[n].abs().amax(-1, keepdim=True)).max()), float((got_lse[n] - lse[n]).abs().max())


def check(lib):
    cases = [  # histories, chunks, Hq, Hk, D, keywords
        ([1000], [200], 32, 8, 128, {}),
        ([4096 + 17], [130], 8, 2, 128, {}),
        ([0, 1, 63, 64, 65, 320, 321, 385], [5, 7, 1, 64, 33, 40, 129, 300], 8, 2, 128, {}),
        ([3000, 129], [100, 33], 8, 1, 128, {}),
        ([3000, 129], [100, 33], 2, 2, 128, {}),
        ([3000, 777], [65, 70], 14, 2, 64, {}),
        ([3000, 777], [65, 70], 9, 3, 64, {}),
        ([3000, 777], [40, 70], 4, 1, 256, {}),
        ([2500, 90], [64, 70], 16, 1, 128, {}),
        ([2500, 900], [200, 40], 8, 2, 128, dict(sliding_window=1024)),
        ([2500, 900], [200, 40], 8, 2, 128, dict(sliding_window=100)),
        ([2500, 900], [400, 40], 8, 2, 128, dict(soft_cap=20.0)),
        ([2500, 900], [60, 40], 8, 2, 128, dict(sink=16, recent=128)),
        ([2500, 900], [60, 40], 8, 2, 128, dict(sink=4, recent=64)),
        ([2500, 900], [60, 40], 8, 2, 128, dict(sink=0, recent=0)),
        ([2500, 900], [60, 40], 8, 2, 128, dict(sink=200, recent=300, means=False)),
        ([40000], [64], 4, 1, 128, {}),
    ]
    bad = 0
    for histories, chunks, hq, hk, d, kw in cases:
        case = History(lib, histories, chunks, hq, hk, d, **kw)
        case.run()
        torch.cuda.synchronize()
        first, worst, worst_lse = case.out.clone(), 0.0, 0.0
        for b in range(len(histories)):
            rows = slice(int(case.start[b]), int(case.start[b + 1]))
            error, lse_error = compare(case.out[rows].double(), case.lse[rows].double(), *case.reference(b))
            worst, worst_lse = max(worst, error), max(worst_lse, lse_error)
        case.out.fill_(float("nan"))
        case.ws.fill_(255)
        case.run()
        torch.cuda.synchronize()
        same = bool((case.out.view(torch.int16) == first.view(torch.int16)).all())
        ok = worst <= MAX_ERROR and same
        bad += not ok
        print(f"{'ok ' if ok else 'BAD'} history {histories} chunk {chunks} heads {hq}/{hk} head_dim {d} {kw}: error {worst:.2e}, lse {worst_lse:.1e}, repeat equal {same}", flush=True)
    print(f"{len(cases) - bad} passed, {bad} failed (bound {MAX_ERROR:.0e})", flush=True)
    return bad


def check_merge(lib):
    """Two parts of one attention, one of them empty for some rows, against the whole."""
    case = History(lib, [500], [70], 8, 2, 128)
    g = torch.Generator(device="cuda").manual_seed(2)
    parts = [torch.randn(70, 8, 128, device="cuda", generator=g).bfloat16() for _ in range(2)]
    lses = [torch.randn(70, 8, device="cuda", generator=g) * 3 for _ in range(2)]
    for k, rows in ((0, slice(0, 5)), (1, slice(3, 9))):      # rows 3 and 4 are empty in both
        lses[k][rows], parts[k][rows] = -math.inf, float("nan")
    w = torch.softmax(torch.stack(lses).double(), 0).nan_to_num()
    ref = sum(w[k][..., None] * parts[k].double().nan_to_num() for k in range(2))
    case.out.copy_(parts[0])
    case.lse.copy_(lses[0])
    case.merge(parts[1], lses[1].T.contiguous())
    torch.cuda.synchronize()
    error, lse_error = float((case.out.double() - ref).abs().max()), float((case.lse.double() - torch.logsumexp(torch.stack(lses).double(), 0)).nan_to_num(0, 0, 0).abs().max())
    ok = error < 2e-2 and lse_error < 1e-5 and bool(torch.isneginf(case.lse[3:5]).all())
    print(f"{'ok ' if ok else 'BAD'} merge: largest difference {error:.1e} (BF16 rounding), lse {lse_error:.1e}")
    return not ok


def fa3_forward(q, k, v, causal, scale):
    """[tokens, heads, D] each, one sequence; output and LSE [heads, tokens]."""
    start = lambda t: torch.tensor([0, t.shape[0]], device="cuda", dtype=torch.int32)
    starts = start(q), start(k)

    def run():
        return torch.ops._vllm_fa3_C.fwd(q, k, v, None, None, None, None, starts[0], starts[1], None, None, None, q.shape[0], k.shape[0], None, None, None, None, None, None,
                                         None, None, None, scale, causal, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)[:2]
    return run


def time_all(lib, fa3):
    rows = []
    for history, chunk, hq, hk, d in [(122880, 8192, 32, 8, 128), (32768, 8192, 32, 8, 128), (122880, 2048, 32, 8, 128), (122880, 8192, 64, 8, 128), (32768, 8192, 32, 8, 64), (32768, 8192, 16, 4, 256)]:
        case = History(lib, [history], [chunk], hq, hk, d)
        us = graph_time(case.run, 1, 30)
        tflops = 4e-6 * history * chunk * hq * d / us
        row = dict(history=history, chunk=chunk, heads=f"{hq}/{hk}", head_dim=d, us=us, tflops=tflops)
        line = f"history {history:6d} chunk {chunk:5d} heads {hq}/{hk} head_dim {d}: {us:9.1f} us = {tflops:5.1f} TFLOP/s"
        if fa3:
            k, v = (torch.randn(history + chunk, hk, d, device="cuda").bfloat16() for _ in "kv")
            alone = graph_time(lambda i, f=fa3_forward(case.q, k[:history], v[:history], False, case.scale): f(), 1, 30)
            whole = graph_time(lambda i, f=fa3_forward(case.q, k, v, True, case.scale): f(), 1, 30)
            fresh = fa3_forward(case.q, k[history:], v[history:], True, case.scale)

            def merged(i):
                case.run()
                case.merge(*fresh())

            ours = graph_time(merged, 1, 30)
            row.update(fa3_history_us=alone, fa3_whole_us=whole, with_chunk_us=ours, ratio_history=us / alone, ratio=ours / whole)
            line += f", FA3 on BF16 {alone:9.1f} us: {us / alone:.3f}x; with the chunk's own keys and the merge {ours:9.1f} us, FA3 {whole:9.1f} us: {ours / whole:.3f}x (goal 1.1)"
        rows.append(row)
        print(line, flush=True)
        del case
        torch.cuda.empty_cache()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--fa3")
    parser.add_argument("--json")
    parser.add_argument("--check-only", action="store_true")
    arguments = parser.parse_args()
    lib = Library(arguments.library)
    if arguments.fa3:
        torch.ops.load_library(arguments.fa3)
    failed = check(lib) + check_merge(lib)
    rows = [] if arguments.check_only or failed else time_all(lib, arguments.fa3)
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(dict(device=torch.cuda.get_device_name(), failed=failed, rows=rows), out, indent=1)
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
