# pyrefly: ignore-errors
import sys, re, torch
import deepinfer_kernels_cuda as kernels
from deepinfer_kernels_cuda import mhc, native
import gpu_rows
from gpu_rows import *
torch.manual_seed(0)

def launchable(way):
    take_way(way)

def check(way, tokens, others=((77, 1024), (300, 4096))):
    launchable(way)
    for t, d in [*((t, D) for t in tokens), *others]: check_mhc(way, t, d)

def times(way, tokens, copy=4256):
    launchable(way)
    for t in tokens: time_mhc(way, t, copy)

def baseline(tokens, copy=4256):
    from deepinfer_kernels_cuda import mhc_main
    old, kernels.mhc_step = kernels.mhc_step, mhc_main.mhc_step
    for t in tokens: time_mhc("main", t, copy)
    kernels.mhc_step = old

NAMES = ["full", "done", "normalised", "mixed", "taken", "summed", "constants", "streams", "squares", "sums"]
def timed(call, k): return f"{{ const u32 t0_ = now_(); {call} spent_[threadIdx.x >> 5][{k}] += now_() - t0_; }}"
def patched(plain):
    text = plain.replace("struct Barriers {", '''__shared__ volatile u32 spent_[16][12];
__device__ __forceinline__ u32 now_() { u32 t; asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory"); return t; }
struct Barriers {''')
    text = re.sub(r"(?:barrier_wait|barrier_wait_cluster)\(bars\.(\w+)\([^;]*;", lambda m: timed(m[0], NAMES.index(m[1])), text)
    text = text.replace("copy_wait<SLOTS - 1>();", timed("copy_wait<SLOTS - 1>();", 7))
    text = text.replace("        float square;\n", "        float square;\n        const u32 t8_ = now_();\n")
    text = text.replace("if (!__any_sync(~0u, tag_of(low) != mail.tag(n) || tag_of(high) != mail.tag(n))) break;", "if (!__any_sync(~0u, tag_of(low) != mail.tag(n) || tag_of(high) != mail.tag(n))) { spent_[threadIdx.x >> 5][8] += now_() - t8_; break; }")
    text = text.replace("            while (true) {\n                bool missing", "            const u32 t9_ = now_();\n            while (true) {\n                bool missing")
    text = text.replace("if (!__any_sync(~0u, missing)) break;\n                __nanosleep(200)", "if (!__any_sync(~0u, missing)) { spent_[threadIdx.x >> 5][9] += now_() - t9_; break; }\n                __nanosleep(200)")
    text = text.replace("    if (threadIdx.x == 0) {\n        for (int n = 0; n < RING", "    for (int k = threadIdx.x; k < 16 * 12; k += THREADS) spent_[k / 12][k % 12] = 0;\n    const u32 t0 = now_();\n    if (threadIdx.x == 0) {\n        for (int n = 0; n < RING", 1)
    text = text.replace("    wait_for_kernels();\n", "    wait_for_kernels();\n    const u32 t1 = now_();\n", 1)
    text = text.replace("    else\n        send_sums(shared, bars, mail, tiles.count, lane, rank);\n", '''    else
        send_sums(shared, bars, mail, tiles.count, lane, rank);
    __syncwarp();
    if (lane == 0) spent_[warp][10] = now_() - t0, spent_[warp][11] = t1 - t0;
    __syncthreads();
    if (threadIdx.x < 16 * 12) new_comb[tokens * 16 + blockIdx.x * 192 + threadIdx.x] = spent_[threadIdx.x / 12][threadIdx.x % 12];
''')
    assert text.count("t0_") > 12 and text.count("t8_") == 2 and text.count("t9_") == 2
    return text

def where(way, tokens):
    source = native._SOURCES / "mhc.cu"
    plain = source.read_text()
    source.write_text(patched(plain))
    launchable(way)
    real = torch.empty
    for t in tokens:
        tensors, options = mhc_inputs(t, 5120)
        big = t + 4096
        torch.empty = lambda *a, **k: real(big, *a[1:], **k) if a and a[0] == t else real(*a, **k)
        for _ in range(3): step = kernels.mhc_step(*tensors, **options)
        torch.cuda.synchronize()
        torch.empty = real
        blocks = 16 * min(mhc._teams(torch.device("cuda"), 10), -(-t // 8))
        spent = step.mix.comb.flatten()[t * 16 :][: blocks * 192].view(blocks, 16, 12).cpu()
        print(f"{way} t={t}: cycles a warp: total (least, most), before, waits")
        for role, warps in (("compute", range(10)), ("mix", [10]), ("norm", [11, 14]), ("load", [12]), ("send", [13])):
            part = spent[:, list(warps)]
            row = part.mean((0, 1))
            print(f"  {role:8s} {row[10]:8.0f} {part[..., 10].min():.0f} {part[..., 10].max():.0f} {row[11]:6.0f} " + " ".join(f"{n} {row[k]:.0f}" for k, n in enumerate(NAMES) if row[k] > 0), flush=True)
    source.write_text(plain)

if __name__ == "__main__":
    exec(sys.argv[1])
