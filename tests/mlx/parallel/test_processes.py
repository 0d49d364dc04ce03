"""Whole processes on a ring: what is left when one of them hangs, ends, or does not start."""

import sys

import pytest

from tests.mlx.parallel import jobs
from tests.mlx.parallel.ring import log_of, ring, start

pytestmark = pytest.mark.prove
TRAIN = """
import os, sys, time
import mlx.core as mx
import mlx.optimizers
from mlx import nn
from halfstep.mlx import prepare

group = mx.distributed.init(backend="ring", strict=True)
timeout = 2.0 if sys.argv[1] == "hangs" else 60.0
run = prepare(nn.Linear(4, 3), mlx.optimizers.SGD(0.1), "fp32", group=group, timeout=timeout)
for step in range(3):
    if group.rank() == 1 and step == 1:
        time.sleep(20) if sys.argv[1] == "hangs" else os._exit(3)
    run.step(lambda model, x: mx.square(model(x)).mean(), [mx.ones((2, 4))])
"""


START = """
from halfstep.mlx.parallel import job

job.CONNECTED = 1.0
job.Host()
"""


def outcome(tmp_path, code, *given, ranks=2):
    """Returns how rank 0 ended, and what it printed."""
    started = start(tmp_path, [sys.executable, "-c", code, *given], ranks)
    try:
        return started[0].wait(60), log_of(tmp_path, 0).read_text()
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_a_process_ends_if_another_hangs(tmp_path):
    code, printed = outcome(tmp_path, TRAIN, "hangs")
    assert code == 1
    assert "error: rank 0 has waited for 2 s at `the sums of update 2`: rank 1 did not arrive" in printed


def test_a_process_ends_if_another_has_ended(tmp_path):
    code, printed = outcome(tmp_path, TRAIN, "ends")
    assert code == 1
    assert "RankError: the connection of rank 0 to the others broke at `the sums of update 2`" in printed


def test_a_process_ends_if_another_never_starts(tmp_path):
    code, printed = outcome(tmp_path, START, ranks=1)
    assert code == 1
    assert "in _wait_for_all_ranks" in printed


def test_three_ranks_train_as_one_up_to_the_order_of_sums(tmp_path):
    """Rank r has micro-batch r, and a ring adds each part of the gradients in an order of its own.

    The terms are the same as those of one process, so the first sums differ by two additions each: together at
    most 4 units of 2^-24 of the terms' norms. The norm rounds once for each of its 56 numbers, on either side.
    """
    policy = "bf16-mixed"
    with ring(tmp_path, 3) as ranks:
        (rows, end, summed, _), *others = ranks(jobs.train, policy, False, False)
    assert all((rows, end, summed) == other[:3] for other in others)
    alone, terms = jobs.train(policy, True, False)[0], jobs.norm_of_terms(policy)
    assert rows[0][:3] == alone[0][:3]
    assert abs(rows[0][3] - alone[0][3]) <= 2.0**-24 * (4 * terms + 2 * 60 * alone[0][3])
