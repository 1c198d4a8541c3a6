"""Pools of forked processes end when they are closed."""

from gristmill.training.testing.forked_pool import ForkedPool


def test_the_pool_that_was_created_first_may_be_closed_first():
    first, second = ForkedPool(1), ForkedPool(1)
    first.close()  # the second's processes were forked with the first's pipe open
    second.close()
    assert not first._helper.is_alive() and not second._helper.is_alive()
