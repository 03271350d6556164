"""Images in prompts: Qwen2.5-VL (arXiv 2502.13923) with its own preprocessing, vision tower and 3-D positions."""
