"""Caches that other tools wrote, one file a sample, become a store."""
