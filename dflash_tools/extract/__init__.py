"""Extraction: run the target once over the data and cache its hidden states in a store."""
