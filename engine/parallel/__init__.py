"""Tensor and pipeline parallelism: one engine whose model is shared by several processes of this host."""
