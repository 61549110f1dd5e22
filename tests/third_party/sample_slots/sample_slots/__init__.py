"""One slot from outside: `scan_accept`, a greedy accept in one launch."""

from sample_slots.spec import SCAN_ACCEPT

SLOTS = (SCAN_ACCEPT,)
