"""Images in prompts: preprocessing and vision towers, of Qwen2-VL (arXiv 2409.12191) and its heirs, Pixtral and Gemma.

`tower` has what all share, with fields of `VisionConfig` for what differs, and `tower_parts` what each is built of.
`image_size` and `image_files` make images ready; `framed` and `reading` put them into prompts, `prompt_images` says
where they stand there, and `encoder` has their vectors.
"""
