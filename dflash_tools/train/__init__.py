"""Training a drafter on a store of hidden states; the call is ``dflash_tools.train.run.run_training``."""
