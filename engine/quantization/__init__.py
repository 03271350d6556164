"""Checkpoints whose weights are quantised: the tensors they have on disk, and how they become ours."""
