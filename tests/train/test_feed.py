import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_tools.errors import StoreError
from dflash_tools.train.feed import Feed


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 50), max_size=30),
    st.integers(1, 120),
    st.integers(1, 4),
)
def test_batches_come_in_order_whatever_the_readers_and_the_bound(sizes, max_bytes, num_readers):
    """RC-13."""
    requests = list(enumerate(sizes))
    with Feed(requests, lambda r: r, num_bytes=lambda r: r[1], max_bytes=max_bytes, num_readers=num_readers) as feed:
        assert list(feed) == requests


def test_no_more_bytes_than_the_bound_are_ahead():
    held, most, lock = 0, 0, threading.Lock()

    def build(size):
        nonlocal held, most
        with lock:
            held += size
            most = max(most, held)
        return size

    with Feed([30] * 20, build, num_bytes=lambda size: size, max_bytes=100, num_readers=4) as feed:
        for size in feed:
            time.sleep(0.001)
            with lock:
                held -= size
    assert most <= 100 + 30  # the one just taken is the consumer's


def test_a_batch_beyond_the_bound_still_passes():
    with Feed([500, 1, 500], lambda r: r, num_bytes=lambda size: size, max_bytes=10) as feed:
        assert list(feed) == [500, 1, 500]


def test_reading_goes_on_while_the_consumer_computes():
    def build(request):
        time.sleep(0.02)
        return request

    with Feed(range(5), build, num_bytes=lambda _: 1, max_bytes=10, num_readers=2) as feed:
        next(feed)
        time.sleep(0.15)
        waited = feed.wait_seconds
        assert list(feed) == [1, 2, 3, 4]
        assert feed.wait_seconds - waited < 0.02


def test_an_error_comes_at_the_turn_of_its_batch():
    def build(request):
        if request == 2:
            raise StoreError("sample 7 is damaged")
        return request

    with Feed(range(5), build, num_bytes=lambda _: 1, max_bytes=10) as feed:
        assert [next(feed), next(feed)] == [0, 1]
        with pytest.raises(StoreError, match="sample 7"):
            next(feed)


def test_an_abandoned_feed_leaves_no_threads():
    before = threading.active_count()
    with Feed(range(1000), lambda r: r, num_bytes=lambda _: 1, max_bytes=100) as feed:
        next(feed)
    assert threading.active_count() == before
