#!/usr/bin/env python3
"""INT2 store on a GPU: page bytes of the exact instances against the CPU's, metric error of the tensor-core ones against
the exact ones, then time per token at the shape of Qwen3-8B.

usage: store.py LIBOSCAR_CUDA_SO GOLDEN_FOLDER [--json FILE] [--check-only]
GOLDEN_FOLDER is written by store_golden (bench/cuda/store_golden.cpp) on any machine with the CPU library.
"""
import argparse
import ctypes as C
import json
import os

import numpy as np
import torch

from oscar_cuda import Library, graph_time

QUANTIZERS = ["min_max", "least_squares", "feedback"]
HEADS, PAGES = 2, 40                # of the golden files
PREFILL_US = 25.0                   # model work a token of an 8K chunk, all layers
TARGET_PERCENT = {"min_max": 1.0, "least_squares": 3.0, "feedback": 3.0}
KEY, VALUE = 0, 1
MAX_METRIC_EXCESS = 0.01            # of the tensor-core instances over the exact ones


class Shape(C.Structure):
    _fields_ = [("struct_size", C.c_size_t)] + [(n, C.c_int32) for n in "num_tokens num_layers num_kv_heads head_dim quantizer exact".split()]


class Side(C.Structure):
    _fields_ = [(n, C.c_void_p) for n in
                "rows pages window transform feedback metric row_sum inverse_diagonal constants block_means".split()]


class Layer(C.Structure):
    _fields_ = [("key", Side), ("value", Side)]


class Params(C.Structure):
    _fields_ = ([("struct_size", C.c_size_t)] + [(n, C.c_void_p) for n in "slot_mapping positions window_slots".split()] + [("num_blocks", C.c_int32)]
                + [(n, C.c_int64) for n in "key_token_stride key_head_stride value_token_stride value_head_stride page_stride_bytes head_stride_bytes "
                   "window_token_stride window_head_stride".split()]
                + [("layer", C.c_void_p), ("device_layers", C.c_void_p)])


def half_bytes(head_dim, quantizer):
    return 16 * head_dim + (512 if quantizer == 0 else 128)


def store(lib, layers, head_dim, num_heads, quantizer, slots, positions=None, window_slots=None, num_blocks=0, device_layers=None, exact=False):
    """layers: list of Layer; more than one needs device_layers (a tensor that holds them)."""
    half, width = half_bytes(head_dim, quantizer), num_heads * head_dim
    shape = Shape(C.sizeof(Shape), slots.numel(), len(layers), num_heads, head_dim, quantizer, exact)
    ptr = lambda t: None if t is None else t.data_ptr()
    params = Params(C.sizeof(Params), ptr(slots), ptr(positions), ptr(window_slots), num_blocks, width, head_dim, width, head_dim,
                    2 * num_heads * half, 2 * half, width, head_dim,
                    C.cast(C.pointer(layers[0]), C.c_void_p) if device_layers is None else None, ptr(device_layers))
    lib.check(lib.lib.oscar_cuda_store(C.byref(shape), C.byref(params), C.c_void_p(torch.cuda.current_stream().cuda_stream)))


def load(folder, name, dtype, shape=(-1,)):
    return torch.from_numpy(np.fromfile(os.path.join(folder, name), dtype=dtype)).reshape(shape).cuda()


def tables(folder, head_dim):
    """The six arrays of each side, in the order of Side."""
    names = [("transform", (HEADS, head_dim, head_dim)), ("feedback", (HEADS, head_dim, head_dim)), ("metric", (HEADS, head_dim, head_dim)),
             ("row_sum", (HEADS, head_dim)), ("inverse", (HEADS, head_dim)), ("constants", (HEADS, 4))]
    return [[load(folder, f"d{head_dim}_{side}_{n}", np.float32, s) for n, s in names] for side in ("key", "value")]


def where(offset, head_dim, quantizer):
    """Coordinates of a byte of the golden pages."""
    half = half_bytes(head_dim, quantizer)
    page, rest = divmod(offset, 2 * HEADS * half)
    head, rest = divmod(rest, 2 * half)
    side, byte = divmod(rest, half)
    part = "codes" if byte < 16 * head_dim else "parameters"
    return f"page {page} head {head} {'KV'[side]} half, byte {byte} ({part})"


def check(lib, folder):
    bad = 0
    for head_dim in (64, 128, 256):
        matrices = tables(folder, head_dim)
        for case in ("prefill", "decode"):
            name = f"d{head_dim}_{case}_"
            slots = load(folder, name + "slots", np.int32)
            num = slots.numel()
            means = load(folder, name + "means", np.float32, (num, HEADS, head_dim))   # one block a token
            positions = (torch.arange(num, device="cuda") * 64 + load(folder, name + "positions", np.int32) % 64).int()
            rows = [load(folder, name + s, np.float32, (num, HEADS, head_dim)).bfloat16() for s in "kv"]
            window_slots = torch.where(torch.arange(num, device="cuda") % 3 == 0, torch.arange(num, device="cuda").flip(0), -1).int()
            for q, quantizer in enumerate(QUANTIZERS):
                pages = load(folder, name + f"before{q}", np.uint8)
                before, expected = pages.clone(), load(folder, name + f"after{q}", np.uint8)
                windows = [torch.full((num, HEADS, head_dim), 7.0, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
                half = half_bytes(head_dim, q)
                sides = [Side(rows[s].data_ptr(), pages.data_ptr() + s * half, windows[s].data_ptr(), *(t.data_ptr() for t in matrices[s]),
                              means.data_ptr() if s == KEY else None) for s in (KEY, VALUE)]
                repeat = True
                for attempt in range(2):
                    pages.copy_(before)
                    store(lib, [Layer(*sides)], head_dim, HEADS, q, slots, positions, window_slots, num, exact=True)
                    torch.cuda.synchronize()
                    repeat = repeat and (attempt == 0 or bool((pages == first).all()))
                    first = pages.clone()
                wrong = (pages != expected).nonzero().flatten()
                chosen = window_slots >= 0
                copied = all(bool((w[window_slots[chosen].long()] == r[chosen]).all()) and int((w == 7.0).all(-1).all(-1).sum()) == num - int(chosen.sum())
                             for w, r in zip(windows, rows))
                ok = wrong.numel() == 0 and copied and repeat
                bad += not ok
                print(f"{'ok ' if ok else 'BAD'} head_dim {head_dim} {case} {quantizer}: {wrong.numel()} of {expected.numel()} page bytes differ, "
                      f"window rows {'equal' if copied else 'DIFFER'}, repeat equal {repeat}", flush=True)
                for offset in wrong[:4].tolist():
                    print(f"    {where(offset, head_dim, q)}: {int(pages[offset]):#x}, expected {int(expected[offset]):#x}, before {int(before[offset]):#x}")
    print(f"{'all equal' if bad == 0 else f'{bad} FAILED'}", flush=True)
    return bad


def decoded(pages, head_dim, quantizer, side, constants):
    """Rows of every slot [pages * 64, HEADS, head_dim] in float64 and their codes."""
    D, n = head_dim, pages.shape[0]
    half = half_bytes(D, quantizer)
    raw = pages.view(n, HEADS, 2, half)[:, :, side].contiguous()
    words = raw[..., :16 * D].contiguous().view(torch.int32)
    codes = torch.empty(n, HEADS, 64, D, device="cuda", dtype=torch.int32)
    if side == KEY:
        w = words.view(n, HEADS, D // 64, 16, 4, 4).permute(0, 1, 3, 5, 2, 4)             # slot / 4, slot % 4, block, word
        out = codes.view(n, HEADS, 16, 4, D // 64, 4, 4, 4)                               # block, j, word, b
        for j in range(4):
            for b in range(4):
                out[..., j, :, b] = w >> (8 * b + 2 * j) & 3
    else:
        w = words.view(n, HEADS, D // 4, 4, 4).permute(0, 1, 3, 2, 4).reshape(n, HEADS, 4, D)   # word, channel
        for j in range(4):
            for b in range(4):
                for t in range(4):
                    codes[:, :, 32 * (j // 2) + 8 * t + 2 * (j % 2) + b % 2 + 4 * (b // 2)] = w[:, :, t] >> (8 * b + 2 * j) & 3
    if quantizer == 0:
        scale, zero = raw[..., 16 * D:].contiguous().view(torch.float32).view(n, HEADS, 2, 64, 1).double().unbind(2)
        rows = (codes - zero) * scale
    else:
        scale, offset = raw[..., 16 * D:].contiguous().view(torch.int8).view(n, HEADS, 2, 64, 1).double().unbind(2)
        center, spread = (constants[:, i].double().view(1, HEADS, 1, 1) for i in (0, 1))
        rows = center + offset * spread / 20 + torch.exp2(scale / 16) * 0.9957 * (codes - 1.5)
    flat = lambda x: x.transpose(1, 2).reshape(n * 64, HEADS, D)
    return flat(rows), flat(codes)


def check_tensor(lib, folder):
    """The tensor-core instances: metric error against the exact ones on rows with outlier channels and a mean, no bit outside the
    stored slots changed, equal when repeated."""
    bad, rows = 0, []
    g = torch.Generator(device="cuda").manual_seed(3)
    span = lambda first, count: torch.arange(first, first + count, device="cuda")
    mappings = {"whole pages": span(64, 2048), "pieces": torch.cat([span(17, 900), span(64 * 20 + 37, 800), torch.full((9,), -1, device="cuda"), span(64 * 36 + 5, 40)]),
                "scattered": torch.randperm(64 * PAGES, device="cuda", generator=g)[:301]}
    for head_dim in (64, 128):
        matrices = tables(folder, head_dim)
        for q, quantizer in enumerate(QUANTIZERS):
            half = half_bytes(head_dim, q)
            for name, slots in mappings.items():
                num = slots.numel()
                slots = slots.int()
                positions = span(1000, num).int()
                mean = 3 * torch.randn(64, HEADS, head_dim, device="cuda", generator=g)
                spread = torch.where(torch.arange(head_dim, device="cuda") % 17 == 0, 10.0, 1.0)
                k = (torch.randn(num, HEADS, head_dim, device="cuda", generator=g) * spread + mean[positions.long() // 64]).bfloat16()
                v = torch.randn(num, HEADS, head_dim, device="cuda", generator=g).bfloat16()
                before = torch.randint(0, 256, (PAGES, HEADS, 2, half), device="cuda", generator=g, dtype=torch.int32).byte()
                windows = [torch.full((num, HEADS, head_dim), 7.0, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
                window_slots = torch.where(torch.arange(num, device="cuda") % 3 == 0, torch.arange(num, device="cuda").flip(0), -1).int()

                def result(start, exact):
                    pages = start.clone()
                    sides = [Side(r.data_ptr(), pages.data_ptr() + s * half, windows[s].data_ptr(), *(t.data_ptr() for t in matrices[s]),
                                  mean.data_ptr() if s == KEY else None) for s, r in ((KEY, k), (VALUE, v))]
                    store(lib, [Layer(*sides)], head_dim, HEADS, q, slots, positions, window_slots, 64, exact=exact)
                    torch.cuda.synchronize()
                    return pages

                exact, fast = result(before, True), result(before, False)
                for w in windows:
                    w.fill_(7.0)
                repeat = bool((fast == result(before, False)).all())
                untouched = bool(((fast ^ result(~before, False)) == (exact ^ result(~before, True))).all())
                chosen = window_slots >= 0
                copied = all(bool((w[window_slots[chosen].long()] == r[chosen]).all()) and int((w == 7.0).all(-1).all(-1).sum()) == num - int(chosen.sum())
                             for w, r in zip(windows, (k, v)))
                stored = slots >= 0
                at, worst, differ = slots[stored].long(), 0.0, []
                for side, r in ((KEY, k), (VALUE, v)):
                    x = r.double() - (mean[positions.long() // 64].double() if side == KEY else 0)
                    y = torch.einsum("nhi,hij->nhj", x, matrices[side][0].double())[stored]
                    metric = matrices[side][2].double()
                    errors, codes = [], []
                    for pages in (exact, fast):
                        got, code = (t[at] for t in decoded(pages, head_dim, q, side, matrices[side][5]))
                        e = got - y
                        errors.append(torch.einsum("nhi,hij,nhj->h", e, metric, e) if quantizer == "feedback" else (e * e).sum((0, 2)))
                        codes.append(code)
                    worst = max(worst, float((errors[1] / errors[0] - 1).max()))
                    differ.append(100 * float((codes[0] != codes[1]).double().mean()))
                ok = worst <= MAX_METRIC_EXCESS and repeat and untouched and copied
                bad += not ok
                rows.append(dict(head_dim=head_dim, quantizer=quantizer, slots=name, error_excess=worst, codes_differ_percent=differ))
                print(f"{'ok ' if ok else 'BAD'} tensor cores, head_dim {head_dim} {quantizer} {name}: error {100 * worst:+.3f} % of the exact one's (worst head and side), "
                      f"codes that differ {differ[0]:.3f} % (keys) {differ[1]:.3f} % (values), other slots {'untouched' if untouched else 'CHANGED'}, "
                      f"window rows {'equal' if copied else 'DIFFER'}, repeat equal {repeat}", flush=True)
    print(f"{'all within bounds' if bad == 0 else f'{bad} FAILED'}", flush=True)
    return bad, rows


class Model:
    """Random rows and the golden matrices at Qwen3-8B's shape, `num_layers` separate layers."""

    def __init__(self, folder, quantizer, num_tokens, num_layers, decode, num_heads=8, head_dim=128):
        g = torch.Generator(device="cuda").manual_seed(1)
        self.quantizer, self.heads, self.head_dim = quantizer, num_heads, head_dim
        half = half_bytes(head_dim, quantizer)
        num_pages = num_tokens if decode else -(-num_tokens // 64)
        index = torch.arange(num_tokens, device="cuda")
        self.slots = ((index * 64 + index * 7 % 64) if decode else index).int()
        self.positions = torch.full((num_tokens,), 64 * 100, device="cuda").int() if decode else index.int()
        self.window_slots = index.int() if decode else torch.where(index >= num_tokens - 256, index - (num_tokens - 256), -1).int()
        self.num_blocks = 512
        self.keep, self.layers = [], []
        matrices = tables(folder, head_dim)
        for _ in range(num_layers):
            pages = torch.zeros(num_pages, num_heads, 2 * half, device="cuda", dtype=torch.uint8)
            sides = []
            for s in (KEY, VALUE):
                rows = torch.randn(num_tokens, num_heads, head_dim, device="cuda", generator=g).bfloat16()
                window = torch.empty(max(256, num_tokens if decode else 0), num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
                own = [t.repeat(num_heads // HEADS, *([1] * (t.dim() - 1))) for t in matrices[s]]
                means = torch.randn(self.num_blocks, num_heads, head_dim, device="cuda", generator=g) if s == KEY else None
                self.keep += [pages, rows, window, own, means]
                sides.append(Side(rows.data_ptr(), pages.data_ptr() + s * half, window.data_ptr(), *(t.data_ptr() for t in own),
                                  None if means is None else means.data_ptr()))
            self.layers.append(Layer(*sides))
        array = (Layer * num_layers)(*self.layers)
        self.device_layers = torch.frombuffer(bytearray(bytes(array)), dtype=torch.uint8).cuda()

    def one_layer(self, lib, i, exact):
        store(lib, [self.layers[i % len(self.layers)]], self.head_dim, self.heads, self.quantizer, self.slots, self.positions, self.window_slots, self.num_blocks, exact=exact)

    def all_layers(self, lib, exact):
        store(lib, self.layers, self.head_dim, self.heads, self.quantizer, self.slots, self.positions, self.window_slots, self.num_blocks, self.device_layers, exact)


def time_all(lib, folder, num_model_layers=36):
    rows = []
    for q, quantizer in enumerate(QUANTIZERS):
        model = Model(folder, q, 8192, 4, decode=False)
        for exact in (True, False):
            us = graph_time(lambda i: model.one_layer(lib, i, exact), 8)
            ns, share, kind = us * 1000 / 8192, 100 * us * num_model_layers / 8192 / PREFILL_US, "exact" if exact else "tensor cores"
            rows.append(dict(kind="prefill", quantizer=quantizer, exact=exact, tokens=8192, us_a_layer=us, ns_a_token_layer=ns, percent_of_prefill=share))
            print(f"prefill 8192 tokens {quantizer:13s} {kind:12s}: {us:8.1f} us a layer, {ns:6.2f} ns a token and layer, {num_model_layers} layers {share:5.2f} % of "
                  f"{PREFILL_US:.0f} us (goal {TARGET_PERCENT[quantizer]:.0f} %)", flush=True)
        del model
    for q, quantizer in enumerate(QUANTIZERS):
        for batch in (1, 8, 64, 256):
            model = Model(folder, q, batch, num_model_layers, decode=True)
            us = [graph_time(lambda i: model.all_layers(lib, exact), 4) for exact in (True, False)]
            rows.append(dict(kind="decode", quantizer=quantizer, batch=batch, layers=num_model_layers, us_exact=us[0], us_tensor_cores=us[1]))
            print(f"decode batch {batch:3d} {quantizer:13s}: exact {us[0]:8.1f} us, tensor cores {us[1]:8.1f} us for {num_model_layers} layers in one launch", flush=True)
            del model
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("golden")
    parser.add_argument("--json")
    parser.add_argument("--check-only", action="store_true")
    arguments = parser.parse_args()
    lib = Library(arguments.library)
    failed = check(lib, arguments.golden)
    excess, tensor_rows = check_tensor(lib, arguments.golden)
    failed += excess
    rows = [] if arguments.check_only else time_all(lib, arguments.golden)
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(dict(device=torch.cuda.get_device_name(), failed=failed, tensor_cores=tensor_rows, rows=rows), out, indent=1)
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
