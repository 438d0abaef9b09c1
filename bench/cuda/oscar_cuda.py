"""ctypes face of the CUDA library for benchmarks and GPU tests, and a float64 reference in torch."""
import ctypes as C
import math

import torch

PAGE = 64
STEP = 0.9957


class Shape(C.Structure):
    _fields_ = [("struct_size", C.c_size_t)] + [(n, C.c_int32) for n in
                "num_requests query_length num_qo_heads num_kv_heads head_dim max_pages num_sms".split()]


class Params(C.Structure):
    _fields_ = ([("struct_size", C.c_size_t)]
                + [(n, C.c_int32) for n in "sink recent sliding_window rotary_dim".split()]
                + [("scale", C.c_float), ("soft_cap", C.c_float), ("seq_lens", C.c_void_p), ("q", C.c_void_p),
                   ("q_token_stride", C.c_int64), ("q_head_stride", C.c_int64), ("pages", C.c_void_p), ("block_table", C.c_void_p),
                   ("block_table_stride", C.c_int64), ("page_stride_bytes", C.c_int64), ("head_stride_bytes", C.c_int64),
                   ("window_k", C.c_void_p), ("window_v", C.c_void_p), ("window_table", C.c_void_p)]
                + [(n, C.c_int64) for n in "window_table_stride window_block_stride window_token_stride window_head_stride".split()]
                + [("window_block", C.c_int32)]
                + [(n, C.c_void_p) for n in "key_matrix value_matrix page_mean key_offset value_offset page_angles out".split()]
                + [("out_token_stride", C.c_int64), ("out_head_stride", C.c_int64), ("lse", C.c_void_p), ("workspace", C.c_void_p), ("schedule", C.c_void_p),
                   ("dependent", C.c_int32)])


class Library:
    def __init__(self, path):
        self.lib = C.CDLL(path)
        self.lib.oscar_last_error.restype = C.c_char_p

    def check(self, code):
        if code:
            raise RuntimeError(self.lib.oscar_last_error().decode())

    def workspace(self, shape):
        n, m = C.c_size_t(), C.c_size_t()
        self.check(self.lib.oscar_cuda_decode_workspace(C.byref(shape), C.byref(n), C.byref(m)))
        return n.value, m.value

    def page_angles(self, frequency, head_dim, rotary_dim, pages):
        out = torch.empty(16 + -(-pages // 16), head_dim, dtype=torch.float32)
        self.check(self.lib.oscar_cuda_page_angles(C.c_void_p(frequency.data_ptr()), head_dim, rotary_dim, pages, C.c_void_p(out.data_ptr())))
        return out

    def decode_matrices(self, matrices):
        host, n = matrices.float().cpu().contiguous(), C.c_size_t()
        call = lambda out: self.check(self.lib.oscar_cuda_decode_matrices(C.c_void_p(host.data_ptr()), host.shape[0], host.shape[1], out, C.byref(n)))
        call(None)
        out = torch.empty(n.value, dtype=torch.uint8)
        call(C.c_void_p(out.data_ptr()))
        return out.to(matrices.device)

    def schedule(self, shape, params, stream):
        self.check(self.lib.oscar_cuda_decode_schedule(C.byref(shape), C.byref(params), C.c_void_p(stream)))

    def decode(self, shape, params, stream):
        self.check(self.lib.oscar_cuda_decode(C.byref(shape), C.byref(params), C.c_void_p(stream)))


class Case:
    """Random cache and queries of one shape; `layers` copies of the pages so that L2 stays cold."""

    def __init__(self, lib, lengths, num_qo_heads, num_kv_heads, head_dim, query_length=1, sink=64, recent=256, sliding_window=0,
                 soft_cap=0.0, layers=1, rotary_dim=None, num_sms=0, seed=0):
        dev, g = "cuda", torch.Generator(device="cuda").manual_seed(seed)
        self.lib, self.D, self.Hq, self.Hk, self.layers = lib, head_dim, num_qo_heads, num_kv_heads, layers
        self.lengths, self.ql, self.sink, self.recent, self.sw, self.cap = lengths, query_length, sink, recent, sliding_window, soft_cap
        B, D, Hk = len(lengths), head_dim, num_kv_heads
        self.B, self.rot = B, rotary_dim if rotary_dim is not None else D
        self.half = 16 * D + 128
        self.page_bytes = 2 * self.half
        pages = max(1, max(-(-n // PAGE) for n in lengths))
        self.blocks = sum(max(1, -(-n // PAGE)) for n in lengths)
        rnd = lambda lo, hi, *s: torch.randint(lo, hi, s, device=dev, generator=g, dtype=torch.int32)
        # one more block, of 0xFF: free pages that a sequence's unused table entries name
        self.pages = torch.empty(layers, self.blocks + 1, Hk, self.page_bytes, device=dev, dtype=torch.uint8)
        for l in range(layers):
            self.pages[l].copy_(torch.randint(0, 256, self.pages[l].shape, device=dev, generator=g, dtype=torch.uint8))
        p = self.pages.view(torch.int8)
        for half in (0, self.half):            # scales near 1, offsets anywhere
            s = p[..., half + 16 * D:half + 16 * D + PAGE]
            s.copy_((s.int() >> 3) - 4)
        self.pages[:, self.blocks] = 255
        self.table = torch.full((B, pages), self.blocks, device=dev, dtype=torch.int32)
        order, at = torch.randperm(self.blocks, device=dev, generator=g).int(), 0
        for b, n in enumerate(lengths):
            k = max(1, -(-n // PAGE))
            self.table[b, :k] = order[at:at + k]
            at += k
        # 16-bit rows in blocks of 16 tokens; only the window's blocks exist, every other entry points at a block of NaN
        wb = 16
        live = [sorted({j // wb for j in list(range(min(sink, n))) + list(range(max(0, n - query_length - recent + 1), n))}) for n in lengths]
        total = 1 + sum(map(len, live))
        self.wk = torch.empty(layers, total, wb, Hk, D, device=dev, dtype=torch.bfloat16)
        self.wv = torch.empty_like(self.wk)
        for l in range(layers):
            self.wk[l].normal_(generator=g)
            self.wv[l].normal_(generator=g)
        self.wk[:, 0] = float("nan")
        self.wv[:, 0] = float("nan")
        self.wtable = torch.zeros(B, max(1, -(-max(lengths) // wb)), device=dev, dtype=torch.int32)
        i = 1
        for b, ids in enumerate(live):
            if ids:
                self.wtable[b, torch.tensor(ids, device=dev)] = torch.arange(i, i + len(ids), device=dev, dtype=torch.int32)
            i += len(ids)
        self.q = torch.randn(B, query_length, num_qo_heads, D, device=dev, generator=g).bfloat16()
        self.km = torch.randn(Hk, D, D, device=dev, generator=g) / D ** 0.5
        self.vm = torch.randn(Hk, D, D, device=dev, generator=g) / D ** 0.5
        self.kt, self.vt = lib.decode_matrices(self.km), lib.decode_matrices(self.vm)
        self.mu = torch.randn(Hk, D, device=dev, generator=g)
        self.ko = torch.stack([torch.randn(Hk, device=dev, generator=g) * .3, torch.full((Hk,), .01, device=dev)], 1).contiguous()
        self.vo = torch.stack([torch.randn(Hk, device=dev, generator=g) * .3, torch.full((Hk,), .01, device=dev)], 1).contiguous()
        half = self.rot // 2
        freq = torch.zeros(D // 2, dtype=torch.float64, device=dev)
        freq[:half] = 1e6 ** (-torch.arange(half, device=dev).double() / half)
        freq = freq.float()
        self.freq = freq.double()
        self.angles = lib.page_angles(freq.cpu(), D, self.rot, pages).to(dev)
        self.lens = torch.tensor(lengths, device=dev, dtype=torch.int32)
        self.out = torch.full_like(self.q, float("nan"))
        self.lse = torch.full((B, query_length, num_qo_heads), float("nan"), device=dev)
        self.shape = Shape(C.sizeof(Shape), B, query_length, num_qo_heads, Hk, D, pages, num_sms)
        workspace, schedule = lib.workspace(self.shape)
        self.ws = torch.zeros(workspace, device=dev, dtype=torch.uint8)
        self.sched = torch.empty(schedule, device=dev, dtype=torch.uint8)
        self.scale = D ** -0.5
        self.params = [self.make(l) for l in range(layers)]
        self.schedule()

    def make(self, l, dependent=0):
        ptr = lambda t: t.data_ptr()
        D, Hk = self.D, self.Hk
        return Params(C.sizeof(Params), self.sink, self.recent, self.sw, self.rot, self.scale, self.cap, ptr(self.lens), ptr(self.q),
                      self.Hq * D, D, ptr(self.pages[l]), ptr(self.table), self.table.stride(0), Hk * self.page_bytes, self.page_bytes,
                      ptr(self.wk[l]), ptr(self.wv[l]), ptr(self.wtable), self.wtable.stride(0), 16 * Hk * D, Hk * D, D, 16,
                      ptr(self.kt), ptr(self.vt), ptr(self.mu), ptr(self.ko), ptr(self.vo), ptr(self.angles), ptr(self.out),
                      self.Hq * D, D, ptr(self.lse), ptr(self.ws), ptr(self.sched), dependent)

    def schedule(self):
        self.lib.schedule(self.shape, self.params[0], torch.cuda.current_stream().cuda_stream)

    def run(self, i=0):
        self.lib.decode(self.shape, self.params[i % self.layers], torch.cuda.current_stream().cuda_stream)

    def bytes(self):
        """Bytes a launch must read: INT2 pages and 16-bit rows of the window."""
        n = 0
        for length in self.lengths:
            h = max(0, length - self.recent - self.sink)
            n += h * (D4 := self.page_bytes / PAGE) + min(length, self.sink + self.recent) * 4 * self.D
        return n * self.Hk

    # ---- float64 reference ----
    def unpack(self, b, l=0):
        D, n = self.D, max(1, -(-self.lengths[b] // PAGE))
        raw = self.pages[l][self.table[b, :n].long()]                       # [n, Hk, bytes]
        def codes(x):
            return x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
        k = codes(raw[..., :16 * D]).view(n, self.Hk, D // 64, 16, 4, 4)    # block, token / 4, word, token % 4
        K = torch.empty(n, self.Hk, PAGE, D, dtype=torch.float64, device="cuda").view(n, self.Hk, 16, 4, D // 64, 4, 4, 4)
        for j in range(4):
            for x in range(4):
                K[..., j, :, x] = ((k >> (8 * x + 2 * j)) & 3).permute(0, 1, 3, 5, 2, 4).double()   # tg, k, u, t
        v = codes(raw[..., self.half:self.half + 16 * D]).view(n, self.Hk, D // 4, 4, 4)            # channel / 4, word, channel % 4
        V = torch.empty(n, self.Hk, PAGE, D, dtype=torch.float64, device="cuda")
        for j in range(4):
            for x in range(4):
                tok = 32 * (j // 2) + 2 * (j % 2) + x % 2 + 4 * (x // 2)
                for t in range(4):
                    V[:, :, tok + 8 * t] = ((v[..., t, :] >> (8 * x + 2 * j)) & 3).reshape(n, self.Hk, D).double()
        K = K.reshape(n, self.Hk, PAGE, D)
        def rows(at, off, code):
            s = raw[..., at:at + PAGE].contiguous().view(torch.int8).double()
            o = raw[..., at + PAGE:at + 2 * PAGE].contiguous().view(torch.int8).double()
            m = off[None, :, :1].double() + o * off[None, :, 1:].double()
            return m[..., None] + torch.exp2(s / 16)[..., None] * STEP * (code - 1.5)
        yk, yv = rows(16 * D, self.ko, K), rows(self.half + 16 * D, self.vo, V)
        return yk.transpose(1, 2).reshape(n * PAGE, self.Hk, D), yv.transpose(1, 2).reshape(n * PAGE, self.Hk, D)

    def reference(self, b, l=0):
        """Output [query_length, Hq, D] and LSE in float64."""
        n, D, G = self.lengths[b], self.D, self.Hq // self.Hk
        out = torch.zeros(self.ql, self.Hq, D, dtype=torch.float64, device="cuda")
        lse = torch.full((self.ql, self.Hq), -math.inf, dtype=torch.float64, device="cuda")
        if n == 0:
            return out, lse
        yk, yv = (x[:n] for x in self.unpack(b, l))
        j = torch.arange(n, device="cuda")
        w = self.wtable[b][j // 16].long()
        wk, wv = self.wk[l][w, j % 16].double(), self.wv[l][w, j % 16].double()
        half = self.rot // 2
        j0 = (j // PAGE * PAGE).double()
        for h in range(self.Hq):
            kv = h // G
            mu = self.mu[kv].double()
            for r in range(self.ql):
                pos = n - self.ql + r
                q = self.q[b, r, h].double()
                seen = j <= pos
                if self.sw:
                    seen = seen & (j > pos - self.sw)
                exact = (j < self.sink) | (j > pos - self.recent)
                c, s = (j0[:, None] * self.freq[:half]).cos(), (j0[:, None] * self.freq[:half]).sin()
                m1, m2 = mu[:half], mu[half:self.rot]
                mean = torch.cat([m1 * c - m2 * s, m2 * c + m1 * s, mu[self.rot:].expand(n, -1)], 1)
                x = yk[:, kv] @ (q @ self.km[kv].double()) + mean @ q
                x = torch.where(exact, wk[:, kv] @ q, x) * self.scale
                if self.cap:
                    x = self.cap * torch.tanh(x / self.cap)
                x = torch.where(seen, x, torch.tensor(-math.inf, dtype=torch.float64, device="cuda"))
                if not bool(seen.any()):
                    continue
                p = torch.softmax(x, 0)
                pe, pi = torch.where(exact, p, 0 * p), torch.where(exact, 0 * p, p)
                out[r, h] = (pi @ yv[:, kv]) @ self.vm[kv].double() + torch.where(exact[:, None] & seen[:, None], wv[:, kv], torch.zeros_like(wv[:, kv])).T @ pe
                lse[r, h] = torch.logsumexp(x, 0)
        return out, lse


def graph_time(fn, calls, replays=30):
    """Median microseconds a call of fn(0 .. calls - 1), captured in one graph."""
    s = torch.cuda.Stream()
    torch.cuda.synchronize()  # what fn reads was made on another stream
    with torch.cuda.stream(s):
        fn(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=s):
        for i in range(calls):
            fn(i)
    times = []
    for r in range(replays + 2):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        if r >= 2:
            times.append(a.elapsed_time(b) * 1000 / calls)
    times.sort()
    return times[len(times) // 2]
