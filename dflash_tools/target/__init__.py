"""The target: loading it, capturing its hidden states, proving that they are the right ones."""
