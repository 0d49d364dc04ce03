"""Masters: from how they are held to fp32 and back, and their averages."""

import pytest
import torch
from torch import nn

from halfstep.core.errors import HalfstepError
from halfstep.core.formats import BF16, FP32
from halfstep.core.roles import Param
from halfstep.torch.numerics.cast import split
from halfstep.torch.numerics.split.operand import values_of
from halfstep.torch.numerics.split.parameter import make_split
from halfstep.torch.optim.masters import Averages, Masters
from tests.torch.nets import draw, same

COUNT = torch.ones((), dtype=torch.int32)


def halves(seed=0):
    number = draw(5, 7, seed=seed)
    hi, lo = split(number)
    p = nn.Parameter(hi)
    make_split(p, lo)
    return p, Masters({p: "w"}, {"w": Param(FP32, split=True)}, {"w": lo}), number


def rounded(param, dtype=torch.bfloat16):
    p = nn.Parameter(draw(64, 8).bfloat16().to(dtype))
    return p, Masters({p: "w"}, {"w": param}, seed=3)


def test_a_whole_master_is_the_parameter_and_a_split_one_is_exact_and_written_in_place():
    p, masters, number = halves()
    hi, lo = p.data_ptr(), masters.remainders["w"].data_ptr()
    assert torch.equal(masters.wide([p])[0], number)
    other = draw(5, 7, seed=1)
    masters.put([p], [other], [COUNT])
    assert same((masters.wide([p])[0], p), (other, split(other)[0]))
    assert (p.data_ptr(), masters.remainders["w"].data_ptr()) == (hi, lo)
    p = nn.Parameter(draw(3))
    assert Masters({p: "w"}).wide([p])[0] is p


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bf16_master_is_rounded_to_nearest_or_by_seed_update_and_name(dtype):
    p, masters = rounded(Param(BF16), dtype)
    new = draw(64, 8, seed=1)
    wide = masters.wide([p])[0]
    assert wide.dtype == torch.float32
    assert wide.data_ptr() != p.data_ptr()
    masters.put([p], [new], [COUNT])
    assert p.dtype == dtype
    assert torch.equal(p.float(), new.bfloat16().float())

    def stored(seed=3, name="w", count=1):
        p = nn.Parameter(torch.zeros(64, 8, dtype=dtype))
        masters = Masters({p: name}, {name: Param(BF16, stochastic=True)}, seed=seed)
        masters.put([p], [draw(64, 8, seed=1)], [torch.tensor(count, dtype=torch.int32)])
        return p.detach().float()

    first = stored()
    assert same((first, first), (stored(), first.bfloat16().float()))
    for other in (stored(seed=4), stored(name="v"), stored(count=2)):
        assert 0.2 < float((first != other).float().mean()) < 0.8  # half of them, were all as likely either way


def test_an_opened_parameter_is_its_fp32_master_stored_afterwards_but_for_an_error():
    p, masters, number = halves()
    identity = id(p)
    with masters.open([p], COUNT):
        assert p.dtype == torch.float32
        assert torch.equal(p, number)
        p.data.mul_(3)
    assert p.dtype == torch.bfloat16
    assert id(p) == identity
    assert torch.equal(masters.wide([p])[0], number * 3)
    with masters.open([p], COUNT):
        p.data = p.data + 1
    assert torch.equal(masters.wide([p])[0], number * 3 + 1)
    p, masters, number = halves()
    before = p.data_ptr()

    def fail():
        p.data.mul_(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), masters.open([p], COUNT):
        fail()
    assert (p.dtype, p.data_ptr()) == (torch.bfloat16, before)
    assert torch.equal(masters.wide([p])[0], number)


@pytest.mark.parametrize("held", ["split", "fp32", "bf16"])
def test_averages_are_used_as_masters_are_held_and_the_masters_come_back_exactly(held):
    p, masters, *_ = halves() if held == "split" else rounded(Param(BF16))
    if held == "fp32":
        p = nn.Parameter(draw(5, 7))
        masters = Masters({p: "w"})
    averages = Averages(masters, [p], 0.5)
    masters.assign([p], [draw(*p.shape, seed=9)], COUNT)
    averages.update(torch.ones(()))
    average, before = averages.named()["w"].clone(), values_of(p).clone()
    remainder = masters.remainders["w"].clone() if held == "split" else None
    with averages.swap_in(COUNT):
        assert p.dtype == before.dtype
        expected = {"split": split(average)[0], "fp32": average, "bf16": average.bfloat16()}[held]
        assert torch.equal(p, expected)
        assert not torch.equal(p, before)
    assert torch.equal(p, before)
    assert remainder is None or torch.equal(masters.remainders["w"], remainder)


@pytest.mark.parametrize("decay", [1.0, -0.5, 2.0, float("nan")])
def test_a_decay_that_averages_nothing_is_refused(decay):
    p = nn.Parameter(draw(3))
    with pytest.raises(HalfstepError, match="between 0 and 1"):
        Averages(Masters({p: "w"}), [p], decay)
