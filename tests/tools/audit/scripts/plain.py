"""A plain loop, a little larger than microscopic: prints its losses' bits and its fastest update's CPU time.

`plain.py UPDATES [crash | never | fork]`
"""

import os
import struct
import sys
import time

import torch
from torch import nn


def main(updates, mistake=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    bits, times = [], []
    try:
        for update in range(updates):
            began = time.process_time()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(256, 256)), torch.randint(16, (256,)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if mistake != "never":
                optimizer.step()
            schedule.step()
            bits.append(struct.pack("f", loss.item()).hex())
            times.append(time.process_time() - began)
            if mistake == "crash" and update == 2:
                raise RuntimeError("out of cheese")
    finally:
        print("losses", *bits, flush=True)
        print("seconds", min(times), flush=True)  # what else runs only adds


main(int(sys.argv[1]), *sys.argv[2:])
if "fork" in sys.argv:
    if os.fork() == 0:
        main(int(sys.argv[1]))
        os._exit(0)
    os.wait()
