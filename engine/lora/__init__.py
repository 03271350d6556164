"""LoRA adapters (Hu et al., arXiv 2106.09685): low-rank additions to a model's projections, chosen by each request."""
