"""Images in prompts: preprocessing and vision towers, of Qwen2-VL (arXiv 2409.12191) and its heirs, and of Pixtral."""
