"""A plugin of pytest: tests that a training step has no mistake of precision, and that two ways train the same.

    def test_step(assert_clean):
        assert_clean(step)                                  # step() makes one update

    def test_bf16(assert_same_training):
        assert_same_training(in_bf16, in_fp32, seeds=range(5))   # each takes a seed, and returns its final loss

pytest finds the fixtures by itself wherever halfstep is installed; `from halfstep.integrations.testing import
assert_clean` works too. Nothing is imported before a test asks for them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

STEPS = 5


def assert_clean(
    step: Callable[[], Any], *, steps: int = STEPS, select: Sequence[str] = (), ignore: Sequence[str] = ()
) -> None:
    """Fails unless `step()`, which makes one update on torch, breaks no rule of the audit in `steps` calls.

    Errors and warnings fail, notes do not. `select` and `ignore` take ids of rules, or their beginnings.
    """
    __tracebackhide__ = True
    from halfstep.core.audit.engine import check
    from halfstep.integrations.first_steps import describe
    from halfstep.torch.instruments.collect.watch import Watch

    with Watch() as watch:
        for _ in range(steps):
            step()
    record = watch.record()
    if watch.guard.failure is not None:
        pytest.fail(f"the audit itself failed: {watch.guard.failure}", pytrace=False)
    if not record.updates:
        pytest.fail("no update was seen: `step()` steps no torch.optim.Optimizer", pytrace=False)
    found = [each for each in check(record, select, ignore) if each.severity != "note"]
    if found:
        pytest.fail("\n".join(map(describe, found)), pytrace=False)


def assert_same_training(
    a: Callable[[int], float], b: Callable[[int], float], seeds: Iterable[int], *, delta: float | None = None
) -> None:
    """Fails unless two ways to train end with the same loss, as `halfstep compare` judges pairs of one seed.

    `a` and `b` take a seed and return a held-out loss; b is the reference. `delta` is the gap that nobody needs to
    care about, by default half of the spread of b's losses over the seeds. "Cannot tell" fails, too.
    """
    __tracebackhide__ = True
    from halfstep.core.compare.gaps import seed_spread, verdict

    chosen = [*seeds]
    if len(chosen) < 2:
        pytest.fail("fewer than two seeds show no spread: name at least two, better five", pytrace=False)
    losses = [(float(a(seed)), float(b(seed))) for seed in chosen]
    margin = seed_spread([reference for _, reference in losses]) / 2 if delta is None else delta
    found = verdict([ours - reference for ours, reference in losses], margin)
    if found.kind != "same":
        more = f"; {found.more_seeds} more seeds would decide" if found.more_seeds else ""
        low, high = found.interval99
        pytest.fail(
            f"{found.kind}: the mean gap of {len(chosen)} seeds is {found.mean:+.4g} (99 %: {low:+.4g} to "
            f"{high:+.4g}), and {margin:.4g} is tolerated{more}",
            pytrace=False,
        )


@pytest.fixture(name="assert_clean")
def _assert_clean() -> Callable[..., None]:
    """`assert_clean(step)` fails unless a training step breaks no rule of the audit."""
    return assert_clean


@pytest.fixture(name="assert_same_training")
def _assert_same_training() -> Callable[..., None]:
    """`assert_same_training(a, b, seeds)` fails unless two ways to train end with the same loss."""
    return assert_same_training
