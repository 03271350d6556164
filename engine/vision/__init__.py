"""Images in prompts: preprocessing, vision towers and 3-D positions of Qwen2-VL (arXiv 2409.12191) and its heirs."""
