"""Images in prompts: preprocessing, vision towers and 3-D positions of Qwen2.5-VL (arXiv 2502.13923) and its heirs."""
