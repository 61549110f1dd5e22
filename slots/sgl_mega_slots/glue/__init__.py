"""Slots that prepare inputs, positions and cache locations between the forwards."""
