"""Decoding with drafter and target: true acceptance length and speed."""
