"""Scratch."""
import ctypes, math, sys, time
import torch
import gpu_bench as gb
from deepinfer_kernels_cuda import routing
from deepinfer_kernels_cuda.native import NativeKernel
from deepinfer_kernels_cuda.tensormaps import tensor_map

dev = torch.device("cuda", 0)
torch.manual_seed(0)
C4096 = 759.0


def warm(fn, calls=10, repeats=9):
    return gb.time_warm(fn, calls, repeats)


def cold(fn):
    return gb.time_cold(fn, 15)


def sel(items, together):
    return NativeKernel("old_router.cu", "router_select", "PPPPiiiifi", threads=128, defines=(f"ITEMS={items}", f"TOGETHER={together}"))


def sel_new(items, parts, top, whole, warps, together=0, keep=0, carve=0, minb=1):
    k = NativeKernel("router.cu", "router_select", "PPPPiifi", threads=32 * warps, defines=(f"ITEMS={items}", f"PARTS={parts}", f"TOP={top}", f"WHOLE={whole}", f"WARPS={warps}", f"TOGETHER={together}", f"KEEP={keep}", f"MINB={minb}"))
    if carve:
        from deepinfer_kernels_cuda.native import _driver
        r = _driver().cuFuncSetAttribute(k._load(0), 9, carve)
        if r: print("carve failed", r)
    return k


KERNELS = {}


def kern(key, make):
    if key not in KERNELS:
        KERNELS[key] = make()
    return KERNELS[key]


def run_old(part, bias, ids, gates, normalise=1, scale=1.5):
    s, t, e = part.shape
    k = ids.shape[1]
    items, tog = -(-e // 128) * 4, int(s > 1)
    kern(("old", items, tog), lambda: sel(items, tog))((t if tog else -(-t // 4), 1, 1), part.data_ptr(), bias.data_ptr(), ids.data_ptr(), gates.data_ptr(), t, e, s, k, scale, normalise, device=dev)


def run_new(part, bias, ids, gates, normalise=1, scale=1.5, warps=4, whole=None, together=0, keep=0, carve=0, minb=1):
    s, t, e = part.shape
    k = ids.shape[1]
    items = -(-e // 128) * 4
    whole = int(e == 32 * items) if whole is None else whole
    key = (items, s, k, whole, warps, together, keep, carve, minb)
    kern(("new", *key), lambda: sel_new(*key))((t if together else -(-t // warps), 1, 1), part.data_ptr(), bias.data_ptr(), ids.data_ptr(), gates.data_ptr(), t, e, scale, normalise, device=dev)


def out(t, k):
    return torch.full((t, k), -7, dtype=torch.int64, device=dev), torch.full((t, k), -7.0, device=dev)


def same(a, b):
    return torch.equal(a[0], b[0]) and torch.allclose(a[1], b[1], rtol=4e-7, atol=0, equal_nan=True)


def select():
    bad = 0
    n = 0
    for e, k in ((384, 6), (384, 8), (384, 1), (384, 32), (384, 9), (256, 8), (512, 6), (130, 7), (100, 4), (64, 6), (33, 32), (32, 32), (6, 6), (509, 31)):
        for t in (1, 5, 513, 4099):
            for kind in ("random", "bias0", "levels", "equal", "nan", "inf", "allnan", "neginfbias", "spread", "nanbias"):
                if kind not in ("random", "levels") and t == 513:
                    continue
                x = torch.randn(1, t, e, device=dev) * 0.7
                bias = torch.randn(e, device=dev) * 0.1
                if kind == "bias0": bias.zero_()
                if kind == "levels": x = torch.randint(-2, 3, (1, t, e), device=dev).float(); bias.zero_()
                if kind == "equal": x.fill_(0.3); bias.zero_()
                if kind == "nan": x[torch.rand_like(x) < 0.1] = math.nan
                if kind == "inf": x[torch.rand_like(x) < 0.02] = math.inf; x[torch.rand_like(x) < 0.1] = -math.inf
                if kind == "allnan": x[torch.rand_like(x) < 0.99] = math.nan
                if kind == "neginfbias": bias[torch.rand_like(bias) < 0.9] = -math.inf
                if kind == "spread": x *= 40; bias = bias * 1000
                if kind == "nanbias": bias[torch.rand_like(bias) < 0.5] = math.nan
                a, b, c = out(t, k), out(t, k), out(t, k)
                run_old(x, bias, *a); run_new(x, bias, *b); run_new(x, bias, *c, whole=0, warps=8)
                n += 1
                ok = same(a, b) and same(b, c)
                if not ok:
                    bad += 1
                    if bad < 8:
                        d = (a[0] != b[0]).any(1).nonzero()[:3, 0].tolist()
                        print("DIFF", e, k, t, kind, "rows", int((a[0] != b[0]).any(1).sum()), d, [a[0][i].tolist()[:8] for i in d[:1]], [b[0][i].tolist()[:8] for i in d[:1]], "gates", float((a[1] - b[1]).abs().max()))
    for s in (2, 3, 4, 5, 8, 10, 16):
        for kind in ("random", "levels"):
            part = torch.randn(s, 777, 384, device=dev) if kind == "random" else torch.randint(-1, 2, (s, 777, 384), device=dev).float()
            bias = torch.randn(384, device=dev) * 0.1 if kind == "random" else torch.zeros(384, device=dev)
            total = torch.zeros(777, 384, device=dev)
            for j in range(s): total = total + part[j]
            a, b, c = out(777, 6), out(777, 6), out(777, 6)
            run_old(total[None], bias, *a); run_new(part, bias, *b); run_new(part, bias, *c, whole=0)
            n += 1
            if not (same(a, b) and same(a, c)): bad += 1; print("DIFF parts", s, kind, int((a[0] != b[0]).any(1).sum()), int((a[0] != c[0]).any(1).sum()))
    print(f"select: {n} cases, {bad} differ from the kernel before")
    for t in (512, 1024, 4096, 16384):
        x, bias = torch.randn(1, t, 384, device=dev) * 0.7, torch.randn(384, device=dev) * 0.1
        o = out(t, 6)
        row = [f"old {warm(lambda: run_old(x, bias, *o)):.2f}/{cold(lambda: run_old(x, bias, *o)):.2f}"]
        for wp, mb in ((4, 1), (4, 12), (4, 16), (8, 1), (8, 8)):
            row.append(f"new{wp}.{mb} {warm(lambda: run_new(x, bias, *o, warps=wp, minb=mb)):.2f}/{cold(lambda: run_new(x, bias, *o, warps=wp, minb=mb)):.2f}")
        print(f"select t={t} one part warm/cold:", *row, flush=True)
    for t, s in ((256, 8), (512, 8), (1024, 4), (1024, 5), (1024, 8), (2048, 4), (4096, 2)):
        x, bias = torch.randn(s, t, 384, device=dev) * 0.4, torch.randn(384, device=dev) * 0.1
        o = out(t, 6)
        row = [f"old {warm(lambda: run_old(x, bias, *o)):.2f}"]
        for p in (2, 4, 8): row.append(f"new{p} {warm(lambda: run_new(x, bias, *o, warps=p)):.2f}")
        print(f"select t={t} parts={s} warm:", *row, flush=True)


def many(x, w, part, bt, be, stages, spans, cluster, more=()):
    t, d = x.shape
    steps = d // 64
    span = -(-steps // spans)
    spans = -(-steps // span)
    shared = stages * (bt + be) * 128 + 1024
    k = kern(("many", bt, be, stages, cluster, more), lambda: NativeKernel("router_many.cu", "router_product", "128s128sPiiii", threads=288, shared=shared,
             defines=(f"TOKENS={bt}", f"EXPERTS={be}", f"STAGES={stages}", f"CLUSTER={cluster}", "EARLY=1", f"SHARED={shared}", *more)))
    tiles = -(-t // bt)
    tiles = -(-tiles // cluster) * cluster
    k((tiles, 384 // be, spans), tensor_map(x, bt), tensor_map(w, be // cluster), part.data_ptr(), t, 384, steps, span, device=dev, cluster=cluster)


FORMS = {"A": {}, "K": {"keep": 1}, "C": {"carve": 100}, "CK": {"carve": 100, "keep": 1}, "M12": {"minb": 12}, "M16": {"minb": 16}, "CM12": {"carve": 100, "minb": 12}}


def split(x, w, s):
    t = x.shape[0]
    if s == 1: return lambda: torch.mm(x, w.t(), out_dtype=torch.float32)[None]
    c = 5120 // s
    a, b = x.view(t, s, c).transpose(0, 1), w.view(384, s, c).permute(1, 2, 0)
    return lambda: torch.bmm(a, b, out_dtype=torch.float32)


def product():
    from deepinfer_kernels_cuda import overlap
    w, bias = torch.randn(384, 5120, device=dev).bfloat16() * 0.01, torch.randn(384, device=dev) * 0.1
    for t, splits in ((512, (4,)), (768, (2, 4)), (1024, (2, 4)), (2048, (2,)), (3072, (1, 2)), (4096, (1, 2)), (16384, (1,))):
        x = torch.randn(t, 5120, device=dev).bfloat16()
        o, want = out(t, 6), out(t, 6)
        mm = split(x, w, 1)
        def main(): run_old(mm(), bias, *o)
        line = [f"main {warm(main):.2f}/{cold(main):.2f}"]
        for s in splits:
            f = split(x, w, s)
            for name, form in FORMS.items():
                if (s > 1 and "K" in name) or (t < 4000 and "M" in name): continue
                if name == "A": line.append(f"product {warm(f):.2f}/{cold(f):.2f}")
                def whole(): run_new(f(), bias, *o, **form)
                line.append(f"{s}.{name} {warm(whole):.2f}/{cold(whole):.2f}")
                p = f()
                run_old(p.sum(0, keepdim=True) if s == 1 else sum(p[1:], p[0])[None], bias, *want)
                if not same(o, want): line.append("DIFFERENT")
            overlap.MODE = overlap.OFF
            line.append(f"{s}.A without overlap {warm(lambda: run_new(f(), bias, *o)):.2f}")
            overlap.MODE = overlap.DRAIN
        line.append(f"main {warm(main):.2f}/{cold(main):.2f}")
        print(f"whole t={t} ceiling {2 * t * 5120 * 384 / C4096 / 1e6:.1f}:", *line, flush=True)


def few():
    w, bias = torch.randn(384, 5120, device=dev).bfloat16() * 0.01, torch.randn(384, device=dev) * 0.1
    for t in (129, 160, 192, 256, 288, 320):
        x = torch.randn(t, 5120, device=dev).bfloat16()
        o, want = out(t, 6), out(t, 6)
        own = (lambda: routing._logits_sm90(x, w)) if t <= 256 else (lambda: routing._logits(x, w))
        def main(): run_old(own(), bias, *o)
        line = [f"parts {own().shape[0]}; main {warm(main, 20):.2f}/{cold(main):.2f}"]
        if t <= 256:
            for name, form in (("A", {}), ("C", {"carve": 100}), ("T2", {"together": 1, "warps": 2}), ("T4", {"together": 1}), ("T4C", {"together": 1, "carve": 100})):
                def whole(): run_new(own(), bias, *o, **form)
                line.append(f"{name} {warm(whole, 20):.2f}/{cold(whole):.2f}")
                run_old(own(), bias, *want)
                if float((o[0] != want[0]).float().mean()) > 1e-3: line.append("DIFFERENT")
        for s in (4, 5, 8):
            f = split(x, w, s)
            for name in "AC":
                def whole(): run_new(f(), bias, *o, **FORMS[name])
                line.append(f"bmm{s}{name} {warm(whole, 20):.2f}/{cold(whole):.2f}")
        line.append(f"main {warm(main, 20):.2f}/{cold(main):.2f}")
        print(f"few t={t}:", *line, flush=True)


def ablate():
    w = torch.randn(384, 5120, device=dev).bfloat16() * 0.01
    for t, forms in ((1024, [(64, 192, 6, 4, 2), (128, 192, 5, 8, 2)]), (4096, [(128, 192, 5, 2, 2), (128, 192, 5, 2, 1)])):
        x = torch.randn(t, 5120, device=dev).bfloat16()
        for bt, be, st, s, cl in forms:
            part = torch.empty(s, t, 384, device=dev)
            line = []
            for more in ((), ("NOSTORE=1",), ("NOLOAD=1", "NOSTORE=1"), ("NOMMA=1", "NOSTORE=1"), ("NOMMA=1", "NOLOAD=1", "NOSTORE=1")):
                line.append(f"{'+'.join(m[:-2] for m in more) or 'all'} {warm(lambda: many(x, w, part, bt, be, st, s, cl, more)):.2f}")
            print(f"  ablation t={t} {bt}x{be} x{s} cl{cl}:", *line, flush=True)


def decode():
    w, bias = torch.randn(384, 5120, device=dev).bfloat16() * 0.01, torch.randn(384, device=dev) * 0.1
    shared = routing._PRODUCT_SHARED
    def make(src, selects):
        k = "k" if src.startswith("old") else ""
        return NativeKernel(src, "router_product", "128s128sPiiii" + ("PPPifi" if k else "PPPfi"), threads=288, shared=shared, defines=(f"SELECTS={selects}", f"SHARED={shared}"))
    mail = torch.full((16 * 128 * 384,), -8531, dtype=torch.int32, device=dev)
    for t in (1, 8, 64, 128):
        x = torch.randn(t, 5120, device=dev).bfloat16()
        tiles, spans, steps, span = routing._cut(t, 5120)
        res, line = {}, []
        for name, src in (("old", "old_router_product.cu"), ("new", "router_product.cu")) * 2:
            o = out(t, 6)
            k = kern((src, 1), lambda: make(src, 1))
            six = (6,) if name == "old" else ()
            def f():
                k((tiles, 4, spans), tensor_map(x, 64), tensor_map(w, 96), mail.data_ptr(), t, 384, steps, span, bias.data_ptr(), o[0].data_ptr(), o[1].data_ptr(), *six, 1.5, 1, device=dev)
            f(); res[name] = o
            line.append(f"{name} {warm(f, 20):.2f}/{cold(f):.2f}")
        print(f"decode t={t}", *line, "equal" if same(res["old"], res["new"]) else "DIFFERENT", flush=True)
    for t in (192, 256):
        x = torch.randn(t, 5120, device=dev).bfloat16()
        o, line = out(t, 6), []
        def f(): run_old(routing._logits_sm90(x, w), bias, *o)
        line.append(f"old {warm(f, 20):.2f}/{cold(f):.2f}")
        for p in (1, 2, 4):
            def f(): run_new(routing._logits_sm90(x, w), bias, *o, warps=p)
            line.append(f"new{p} {warm(f, 20):.2f}/{cold(f):.2f}")
        print(f"two launches t={t}", *line, flush=True)


def lt():
    L = ctypes.CDLL("libcublasLt.so.13")
    def chk(r):
        if r: raise RuntimeError(f"cublasLt {r}")
    P = ctypes.c_void_p
    h = P(); chk(L.cublasLtCreate(ctypes.byref(h)))
    d = P(); chk(L.cublasLtMatmulDescCreate(ctypes.byref(d), 68, 0))
    one = ctypes.c_int(1); chk(L.cublasLtMatmulDescSetAttribute(d, 3, ctypes.byref(one), 4))
    def layout(ty, r, c, ld):
        p = P(); chk(L.cublasLtMatrixLayoutCreate(ctypes.byref(p), ty, ctypes.c_uint64(r), ctypes.c_uint64(c), ctypes.c_int64(ld))); return p
    pref = P(); chk(L.cublasLtMatmulPreferenceCreate(ctypes.byref(pref)))
    ws = torch.empty(64 << 20, dtype=torch.uint8, device=dev)
    size = ctypes.c_uint64(64 << 20); chk(L.cublasLtMatmulPreferenceSetAttribute(pref, 1, ctypes.byref(size), 8))
    w = torch.randn(384, 5120, device=dev).bfloat16() * 0.01
    alpha, beta = ctypes.c_float(1), ctypes.c_float(0)
    for t in (1024, 4096):
        x = torch.randn(t, 5120, device=dev).bfloat16()
        y = torch.empty(t, 384, device=dev)
        ref = x.float() @ w.float().t()
        A, B, D = layout(14, 5120, 384, 5120), layout(14, 5120, t, 5120), layout(0, 384, t, 384)
        buf = (ctypes.c_uint8 * (96 * 64))(); got = ctypes.c_int()
        chk(L.cublasLtMatmulAlgoGetHeuristic(h, d, A, B, D, D, pref, 40, buf, ctypes.byref(got)))
        base = ctypes.addressof(buf); rows = []
        print(f"lt t={t}: {got.value} algorithms; mm {warm(lambda: torch.mm(x, w.t(), out_dtype=torch.float32)):.2f}", flush=True)
        for i in range(got.value):
            algo = P(base + 96 * i)
            cfg = []
            for a in (0, 1, 2, 3, 6, 7, 8):
                v = ctypes.c_uint32(0); n = ctypes.c_size_t(); L.cublasLtMatmulAlgoConfigGetAttribute(algo, a, ctypes.byref(v), 2 if a >= 7 else 4, ctypes.byref(n)); cfg.append(v.value)
            def f():
                chk(L.cublasLtMatmul(h, d, ctypes.byref(alpha), P(w.data_ptr()), A, P(x.data_ptr()), B, ctypes.byref(beta), P(y.data_ptr()), D, P(y.data_ptr()), D, algo, P(ws.data_ptr()), ctypes.c_size_t(64 << 20), P(torch.cuda.current_stream().cuda_stream)))
            try:
                u = warm(f, 10, 5)
                rows.append((u, i, cfg, f))
            except Exception as e:
                print(i, cfg, str(e)[:80])
        rows.sort(key=lambda r: r[0])
        for u, i, cfg, f in rows[:7]:
            f(); err = float((y - ref).norm() / ref.norm())
            print(f"  #{i} id,tile,splitk,red,stages,inner,cluster={cfg} warm {u:.2f} cold {cold(f):.2f} err {err:.1e}", flush=True)


def official():
    import gpu_ops
    gpu_ops.run_router(gb.Recorder("router"))


if __name__ == "__main__":
    begin = time.time()
    try:
        globals()[sys.argv[1]]()
    finally:
        print(f"[{sys.argv[1]} {time.time() - begin:.0f} s]", flush=True)
