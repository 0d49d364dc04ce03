"""Compares a step with the same step in fp32, and with noise of its format (definitions: core/compare/shadow.py).

    the policy's pass        as the step computes, eagerly; its random numbers are those of the next step
    the fp32 pass            all modules in fp32, with whole masters, without the model's own casts (own_casts.py)
    DRAWS noisy passes       in fp32, with every operand of every matmul moved by half an ulp (noise.py)
    if a number is           groups of modules in the policy's formats, the rest in fp32, halved until single
    outside of the band      modules remain that lead outside by themselves: the causes

None of them has a lasting effect (replay.py). Memory: activations in fp32, and gradients in fp32 twice. Waits for
the device. Every process of a job calls it, with its own micro-batches.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.core.compare.shadow import DRAWS, Pass, Shadow, Sums, compare_passes, sum_by_layer
from halfstep.core.errors import ReplayError
from halfstep.core.formats import FP32
from halfstep.core.precision import Precision
from halfstep.torch.instruments.noise import PassMode, RandomNumbers
from halfstep.torch.instruments.observe.sums import sum_dtype
from halfstep.torch.instruments.own_casts import OwnCasts
from halfstep.torch.instruments.replay import Replay, precisions_of, replay, switch_formats
from halfstep.torch.numerics.shards import local

CAUSES, PASSES = 3, 40  # the search stops after this many causes, or passes


def shadow(run: Any, loss_fn: Callable[[Any], Any], batches: Iterable[Any]) -> Shadow:
    """Compares a step from micro-batches with the same step in fp32; no update is made."""
    if run.sharded is not None and run.accumulation.begun:
        raise ReplayError(
            "FSDP holds gradients that no update has used, and another pass would add to them",
            hint="call run.shadow() before the first micro-batch of an update, or after run.update()",
        )
    return _ShadowPasses(run, loss_fn, [*batches]).compare()


class _ShadowPasses:
    def __init__(self, run: Any, loss_fn: Callable[[Any], Any], batches: list[Any]):
        if not batches:
            raise ReplayError("there are no batches to run again", hint="pass those of a step: [batch]")
        self.run, self.loss_fn, self.batches = run, loss_fn, batches
        self.precisions, self.draws = precisions_of(run.model), RandomNumbers()
        self.own = OwnCasts(run.model, self.precisions)

    def compare(self) -> Shadow:
        """Runs all passes."""
        noise = " and ".join(dict.fromkeys(str(p.operand.format) for p in self.precisions.values()))
        first = self._run(self.precisions, PassMode(self.draws))
        self.reference = self._run_reference()
        ours = self._compare_with_reference(first)
        del first  # gradients of the whole model
        modes = [PassMode(self.draws, self.own, self.precisions, draw) for draw in range(DRAWS)]
        noisy = [self._compare_with_reference(self._run({}, mode, FP32)) for mode in modes]
        reference = float(self.reference.loss)
        result = replace(
            compare_passes(ours, reference, noisy, noise), casts=self.own.casts, unwidened=self.own.unwidened
        )
        if not result.outside and not result.loss_outside:
            return result

        def leads_outside(names: list[str]) -> bool:
            below = [n for n in self.precisions if any(f"{n}.".startswith(f"{name}.") for name in names)]
            for group in (names, below):
                self.own.as_written = given = {name: self.precisions[name] for name in group}
                try:
                    passed = self._run(given, PassMode(self.draws, self.own))
                except Exception:  # their code does not take what the rest gives in fp32
                    continue
                alone = compare_passes(self._compare_with_reference(passed), reference, noisy, noise)
                return bool(alone.outside) or alone.loss_outside or not alone.finite
            return len(names) > 1  # fewer of them may run

        suspects = [n for n, p in self.precisions.items() if p != Precision() or n in self.own.casts]
        return replace(result, causes=tuple(_causes(suspects, leads_outside)))

    def _run_reference(self) -> Replay:
        """Runs the fp32 pass, with those of the model's own casts that it cannot do without."""
        while True:
            try:
                return self._run({}, PassMode(self.draws, self.own), FP32)
            except Exception as error:
                if not self.own.keep(error):
                    raise

    def _run(self, precisions: Mapping[str, Precision], mode: PassMode, accumulate: Any = None) -> Replay:
        try:
            with switch_formats(self.run, precisions), mode.watch(self.run.model), mode:
                return replay(self.run, self.loss_fn, self.batches, accumulate)
        finally:
            self.draws.rewind()

    def _compare_with_reference(self, given: Replay) -> Pass:
        """Compares gradients with those of the fp32 pass on the device, and reads the sums."""
        names = [*self.reference.gradients]
        rows = []
        for name in names:
            b = local(self.reference.gradients[name])
            a = local(given.gradients[name]) if name in given.gradients else torch.zeros_like(b)
            rows.append(torch.stack([_square(a), _square(b), _square(a - b)]))
        sums = torch.stack(rows)
        if self.run.num_copies:  # each rank has its shards
            dist.all_reduce(sums)
            sums /= self.run.num_copies
        parts = {name: Sums(*row) for name, row in zip(names, sums.tolist(), strict=True)}
        return Pass(float(given.loss), sum_by_layer(parts))


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=sum_dtype(x.device)).square()


def _causes(suspects: list[str], leads_outside: Callable[[list[str]], bool]) -> list[str]:
    """Returns suspects that lead outside by themselves; the number of passes is limited."""
    groups, found = [suspects], list[str]()
    for _ in range(PASSES):
        if not groups or len(found) == CAUSES:
            break
        group = groups.pop(0)
        if not group or not leads_outside(group):
            continue
        if len(group) == 1:
            found += group
        else:
            half = len(group) // 2
            groups = [group[:half], group[half:], *groups]  # depth first
    return found
