"""Allocations in order: the peak, and what torch's caching allocator reserves for them."""

from halfstep.torch.instruments.planning.tracker import MIB, Ledger


def test_the_peak_is_what_was_alive_when_the_most_bytes_were():
    ledger = Ledger()
    first = ledger.allocate(1000, "forward")
    second = ledger.allocate(3000, "forward", (750,))
    ledger.free(first)
    ledger.allocate(10, "backward")
    assert ledger.at_peak() == [first, second]
    assert ledger.by_role(lambda key, a: a.phase) == {"forward": 1024 + 3072}  # in blocks of 512 bytes
    ledger.free(second)


def test_small_middle_and_large_allocations_have_segments_of_2_20_and_their_own_size():
    sizes = {1: 2, MIB: 2, MIB + 1: 20, 9 * MIB: 20, 10 * MIB: 10, 11 * MIB + 1: 12}
    for nbytes, reserved in sizes.items():
        ledger = Ledger()
        ledger.allocate(nbytes, "forward")
        assert ledger.reserved() == reserved * MIB, nbytes


def test_freed_memory_is_used_again_and_neighbors_become_one():
    ledger = Ledger()
    halves = [ledger.allocate(6 * MIB, "forward") for _ in range(2)]  # of a segment of 20 MiB
    for half in halves:
        ledger.free(half)
    ledger.allocate(18 * MIB, "forward")
    assert ledger.reserved() == 20 * MIB
