"""Lists what an update of hugging_face.py's arms spends on an NVIDIA GPU, kernel by kernel.

python benchmarks/measure/hugging_face_kernels.py gpt2 causal halfstep
"""

import argparse
from collections import Counter

import hugging_face
import torch
from torch.profiler import ProfilerActivity, profile

WARMUP, PROFILED, SHOWN = 8, 3, 26
KINDS = {"matmul": ("gemm", "nvjet", "cutlass"), "attention": ("flash", "fmha", "cudnn"), "inductor": ("triton_",)}


def kind_of(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(p in kernel.lower() for p in parts)), "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=[*hugging_face.SHAPES])
    parser.add_argument("arms", nargs="+", choices=hugging_face.SECTIONS["plain"].arms)
    options = parser.parse_args()
    given = argparse.Namespace(tiny=False, device="cuda", backend="inductor", batch=None)
    for arm in options.arms:
        torch.compiler.reset()
        shape = hugging_face.SHAPES[options.model]
        model = shape.make(given, None)
        step = hugging_face._make_step(arm, model, hugging_face.SPLIT, given)
        batches = [shape.draw(model, seed, given, "cuda") for seed in range(4)]
        for i in range(WARMUP):
            step(batches[i % 4])
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for i in range(PROFILED):
                step(batches[i % 4])
            torch.cuda.synchronize()
        times, kinds = Counter[str](), Counter[str]()
        for event in profiled.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name] += event.device_time / PROFILED / 1e3
        for kernel, taken in times.items():
            kinds[kind_of(kernel)] += taken
        table = ", ".join(f"{kind} {taken:.1f}" for kind, taken in kinds.most_common())
        print(f"{options.model} {arm}, ms per update: {times.total():.1f}, of which {table}")
        for kernel, taken in times.most_common(SHOWN):
            print(f"{taken:8.3f}  {kernel[:110]}")
        del model, step, batches
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
