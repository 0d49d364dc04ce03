"""Signals become a request, twice is enough, and the handlers come back."""

import os
import signal
import threading

import pytest

from halfstep.training.run.signals import SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def not_ignored():
    """The tests may run with SIGINT ignored, as a shell does in the background."""
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before:
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_is_a_request(name):
    before = handlers()
    with StopRequest() as stop:
        assert stop.requested is None
        send(getattr(signal, name))
        assert stop.requested == name
    assert handlers() == before


def test_a_second_sigint_interrupts_and_a_second_sigterm_does_not():
    before = handlers()
    with StopRequest() as stop:
        send(signal.SIGINT)
        assert stop.requested == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert handlers() == before
    with StopRequest() as stop:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop.requested == "SIGTERM"
        send(signal.SIGINT)  # Python may hand over a SIGINT after a SIGHUP that came later
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.requested == "SIGTERM"
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert handlers() == before


def test_blocks_nest_and_after_the_conclusion_only_sigint_ends_the_process():
    stop = StopRequest()
    with stop:
        with stop:
            send(signal.SIGTERM)
        send(signal.SIGTERM)  # between the run and the page
        assert stop.requested == "SIGTERM"
        stop.conclude()
    ends, ignored = signal.SIG_DFL, signal.SIG_IGN
    assert handlers() == [ends if number == signal.SIGINT else ignored for number in SIGNALS]


def test_what_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            send(signal.SIGTERM)
            assert stop.requested is None
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_nothing_is_installed():
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append((stop.requested, handlers()))

    before = handlers()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
