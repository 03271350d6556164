"""Checkpoints whose weights are quantised: what `config.json` says of them, and the tensors they have on disk."""
