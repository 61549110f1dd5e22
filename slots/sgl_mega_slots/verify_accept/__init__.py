"""Slots that decide what of a drafted block stands."""
