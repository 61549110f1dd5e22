"""Slots of the target model's own forward."""
