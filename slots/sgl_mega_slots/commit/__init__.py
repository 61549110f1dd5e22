"""Slots that write what the accepted tokens leave behind."""
