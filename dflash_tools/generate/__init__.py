"""The target writes the responses that a drafter is trained on: token ids and loss mask exactly as generated."""
