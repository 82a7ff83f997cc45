"""Admission in the api process, and what Retry-After is made of."""

from __future__ import annotations

import pytest

from nanoserve.api.admission import Admission, DrainRate
from nanoserve.api.errors import Unavailable


def test_the_limit_counts_single_requests_and_frees_with_them() -> None:
    admission = Admission(max_running=2, max_queued=2)
    admission.admit(3, 0.0)
    with pytest.raises(Unavailable) as refused:
        admission.admit(2, 0.0)
    assert refused.value.status == 503 and refused.value.retry_after_s >= 1
    admission.admit(1, 0.0)
    admission.leave(3)
    admission.admit(3, 1.0)
    assert (admission.num_held, admission.num_rejected) == (4, 1)


def test_an_empty_server_takes_one_request_of_any_size() -> None:
    admission = Admission(max_running=1, max_queued=1)
    admission.admit(100, 0.0)
    with pytest.raises(Unavailable):
        admission.admit(1, 0.0)


@pytest.mark.rule(14)
def test_status_of_overload_is_a_choice() -> None:
    admission = Admission(max_running=1, max_queued=0, overload_status=429)
    admission.admit(1, 0.0)
    with pytest.raises(Unavailable) as refused:
        admission.admit(1, 0.0)
    assert (refused.value.status, refused.value.error_type) == (429, "rate_limit_error")


@pytest.mark.rule(14)
def test_retry_after_follows_the_measured_rate_within_bounds() -> None:
    admission = Admission(max_running=10, max_queued=100)
    admission.admit(110, 0.0)
    assert admission.retry_after_s(0.0) == 1.0  # nothing is known yet
    for step in range(21):
        admission.drain.note_ended(step, step * 0.5)  # two a second, of all api processes
    assert 20 <= admission.retry_after_s(10.0) <= 30  # half of the queue, 50 requests, at two a second
    assert admission.retry_after_s(1000.0) == 1.0  # old ends are forgotten
    slow = Admission(max_running=10, max_queued=100_000)
    slow.admit(100_010, 0.0)
    for step in range(3):
        slow.drain.note_ended(step, step * 1.0)
    assert slow.retry_after_s(3.0) == 60.0


def test_many_ends_at_once_are_one_look() -> None:
    drain = DrainRate()
    for step in range(10_000):
        drain.note_ended(step, 1.0 + step * 1e-4)
    assert len(drain._looks) <= 25 and 9_000 <= drain.per_second(2.0) <= 11_000


def test_a_key_that_floods_leaves_places_to_others() -> None:
    admission = Admission(max_running=4, max_queued=8)
    for _ in range(6):  # half of the places for the only key
        admission.admit(1, 0.0, "flood")
    with pytest.raises(Unavailable):
        admission.admit(1, 0.0, "flood")
    admission.admit(5, 0.0, "batch")  # one request of many, from a key that holds nothing
    with pytest.raises(Unavailable):
        admission.admit(1, 0.0, "batch")
    admission.leave(5, "batch")
    admission.leave(6, "flood")
    assert admission.num_held == 0 and not admission._held_by_key
