"""Slots that propose a block of draft tokens."""
